"""Work-pool templates: every variable is used, checked by its schema, and rendered into what the worker reads."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex

import pytest
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.utilities.schema_tools.validation import is_valid, validate
from prefect.utilities.templating import apply_values

from deployments.create_pools import create, templates
from deployments.local_service import Service, fetch

POOLS = templates()
REQUIRED = {
    "process": {},
    "docker": {"image": "forge"},
    "kubernetes": {"image": "forge", "node_selector": {"gpu": "h100"}, "gpu_count": 4},
    "slurm": {"partition": "gpu", "account": "lab", "python": "/s/python", "working_dir": "/s"},
}
CONFIGURATIONS = {
    "process": "prefect.workers.process:ProcessJobConfiguration",
    "slurm": "prefect.workers.process:ProcessJobConfiguration",
    "docker": "prefect_docker.worker:DockerWorkerJobConfiguration",
    "kubernetes": "prefect_kubernetes.worker:KubernetesWorkerJobConfiguration",
}


def schema(pool: WorkPoolCreate) -> dict:
    return pool.base_job_template["variables"]


def render(name: str) -> dict:
    """The job configuration that a worker makes of a template, read by the worker's own class where it is installed."""
    properties = schema(POOLS[name])["properties"]
    defaults = {key: value["default"] for key, value in properties.items() if "default" in value}
    content = apply_values(POOLS[name].base_job_template["job_configuration"], defaults | REQUIRED[name])
    module, _, attribute = CONFIGURATIONS[name].partition(":")
    if importlib.util.find_spec(module.split(".")[0]) is None:
        return content
    return getattr(importlib.import_module(module), attribute).model_validate(content).model_dump(mode="json")


def test_there_is_a_template_for_every_kind_of_pool():
    assert {name: pool.type for name, pool in POOLS.items()} == {
        "process": "process",
        "docker": "docker",
        "kubernetes": "kubernetes",
        "slurm": "process",
    }


@pytest.mark.parametrize("name", POOLS)
def test_variables_are_those_that_the_template_uses(name: str):
    used = set(re.findall(r"{{ (\w+) }}", json.dumps(POOLS[name].base_job_template["job_configuration"])))
    assert used == set(schema(POOLS[name])["properties"])


@pytest.mark.parametrize("name", POOLS)
def test_defaults_and_what_is_required_pass_the_schema(name: str):
    defaults = {key: value["default"] for key, value in schema(POOLS[name])["properties"].items() if "default" in value}
    assert validate(defaults | REQUIRED[name], schema(POOLS[name])) == []
    for missing in schema(POOLS[name]).get("required", ()):
        given = {key: value for key, value in REQUIRED[name].items() if key != missing}
        assert not is_valid(defaults | given, schema(POOLS[name]))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("docker", {"gpu_count": "all"}),
        ("docker", {"shm_size": "big"}),
        ("kubernetes", {"gpu_count": -1}),
        ("kubernetes", {"node_selector": "gpu=h100"}),
        ("slurm", {"partition": "gpu; rm -rf /"}),
        ("slurm", {"time_limit": "forever"}),
        ("slurm", {"nodes": 0}),
        ("process", {"env": {"A": 1}}),
    ],
)
def test_a_wrong_job_variable_is_refused(name: str, wrong: dict):
    assert not is_valid(REQUIRED[name] | wrong, schema(POOLS[name]))


@pytest.mark.parametrize("name", POOLS)
def test_a_rendered_job_has_no_placeholder_left(name: str):
    assert "{{" not in json.dumps(render(name))


def test_a_docker_job_asks_for_gpus_and_shared_memory():
    assert render("docker")["container_create_kwargs"] == {
        "device_requests": [{"Driver": "nvidia", "Count": -1, "Capabilities": [["gpu"]]}],
        "shm_size": "64g",
    }


def test_a_kubernetes_job_asks_for_gpus_nodes_shared_memory_and_names_its_secret():
    spec = render("kubernetes")["job_manifest"]["spec"]
    assert spec["backoffLimit"] == 0
    pod = spec["template"]["spec"]
    assert pod["nodeSelector"] == {"gpu": "h100"}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}]
    [container] = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4, "memory": "192Gi"}
    assert container["envFrom"] == [{"secretRef": {"name": "forge-flows"}}]
    assert "AWS" not in json.dumps(POOLS["kubernetes"].base_job_template)


def test_a_slurm_job_has_its_nodes_partition_account_time_and_gpus_and_runs_the_flow_on_the_first_node():
    words = shlex.split(render("slurm")["command"])
    step = words.index("srun")
    assert words[0] == "salloc"
    wanted = {"--nodes=1", "--partition=gpu", "--account=lab", "--time=24:00:00", "--gpus-per-node=8"}
    assert wanted <= set(words[:step])
    assert {"--nodes=1", "--ntasks=1", "--overlap"} <= set(words[step:])
    assert words[-3:] == ["/s/python", "-m", "prefect.engine"]


@pytest.mark.slow
def test_a_server_takes_every_template_and_takes_it_again(prefect_server: Service):
    assert [create(pool) for pool in POOLS.values()] == ["created"] * 4
    assert [create(pool) for pool in POOLS.values()] == ["updated"] * 4
    for name, pool in POOLS.items():
        found = fetch(f"{prefect_server.url}/work_pools/{name}")
        assert isinstance(found, dict)
        assert found["base_job_template"] == pool.base_job_template
