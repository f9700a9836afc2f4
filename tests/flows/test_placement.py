"""Stages in other work pools: two workers with homes and scratch of their own, and nothing between them but S3."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import mlflow
import psutil
import pytest
from prefect import flow, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterTags,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.logging import get_run_logger
from prefect.states import AwaitingRetry, Cancelling
from prefect.utilities.callables import parameter_schema

from deployments import object_stores, services
from deployments.create_pools import create, templates
from deployments.local_service import Service, wait_ready
from deployments.stage_deployments import PULL, deploy_stage
from forge_core.artifacts import Manifest, Ref, resolve
from forge_core.config import PostTrainConfig
from forge_core.faults import Fault, FaultPlan
from forge_core.operation import WarmthConfig
from forge_core.placement_config import PlacementConfig
from forge_core.plan import Plan
from tasks import stages
from tasks.placement import Placement
from tasks.processes import stage_processes
from tasks.run import open_run
from tests.flows.deployed import finished, start_run
from tests.flows.placed import placed
from tests.pipeline import COLD, tiny_config, weights_sha256

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

POOLS = ("near", "far")


@pytest.fixture(scope="module")
def workers(
    prefect_server: Service, seaweed_server: Service, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Service]]:
    """A worker for each of two pools, as if on machines of their own."""
    started = {}
    try:
        for pool in POOLS:
            create(templates()["process"].model_copy(update={"name": pool}))
            deploy_stage(pool)
            home = tmp_path_factory.mktemp(pool)
            env = object_stores.s3_env(seaweed_server.url) | {"HOME": str(home), "TMPDIR": str(home)}
            env["PREFECT_WORKER_QUERY_SECONDS"] = "2"  # two workers that ask each second block the server's SQLite
            started[pool] = services.start_worker(pool, home, prefect_server.url, env=env)
        wait_ready(*started.values())
        yield started
    finally:
        for worker in started.values():
            worker.stop()


def children(run_uri: str) -> list[FlowRun]:
    """The flow runs of the stages of a run, the oldest first."""
    stage_runs = FlowRunFilter(tags=FlowRunFilterTags(all_=["forge"]))
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=stage_runs, sort=FlowRunSort.EXPECTED_START_TIME_ASC)
    return [run for run in found if run.parameters.get("job", {}).get("output", "").startswith(run_uri)]


def where(run_uri: str) -> list[tuple[str | None, str | None]]:
    """Pool and final state of each of them."""
    return [(run.work_pool_name, run.state_name) for run in children(run_uri)]


def placed_config(
    root: str, pools: dict[str, tuple[str, ...]], *faults: Fault, redirect_after_seconds: float = 600
) -> PostTrainConfig:
    return tiny_config(
        root,
        placement=PlacementConfig(pools=pools, redirect_after_seconds=redirect_after_seconds),
        keep_warm=COLD,
        fault_plan=FaultPlan(faults=faults) if faults else None,
    )


@flow(persist_result=False)
def first_policies(config: PostTrainConfig) -> list[Ref]:
    """The policies v0000 and v0001."""
    with stage_processes(config, get_run_logger()):
        plan = Plan(config, "run")
        policy = stages.start(plan.start())
        assert plan.sft_config is not None
        return [policy, stages.sft(plan.sft(policy, stages.dataset(plan.dataset(plan.sft_config.dataset))))]


def test_policies_are_the_same_wherever_they_are_made(workers: dict[str, Service], seaweed_s3: str, tmp_path):
    there = placed_config(f"{seaweed_s3}/there", {"start": ("near",), "sft": ("far",)})
    here = tiny_config(str(tmp_path), keep_warm=WarmthConfig(generator=False, reference=False))
    made_there, made_here = first_policies(there), first_policies(here)
    assert weights_sha256([resolve(ref) for ref in made_there]) == weights_sha256([resolve(ref) for ref in made_here])
    assert where(there.root) == [("near", "Completed"), ("far", "Completed")]


def test_a_paused_pool_is_left_for_the_next_one_then_passed_over_and_the_run_shows_it(
    workers: dict[str, Service], mlflow_server: Service, seaweed_s3: str
):
    config = placed_config(f"{seaweed_s3}/paused", {"dataset": POOLS}, redirect_after_seconds=2)

    @flow(persist_result=False)
    def two_datasets() -> str:
        with open_run(config, "run") as run:
            stages.dataset(run.plan.dataset(config.sft.dataset))
            stages.dataset(run.plan.dataset(config.evals[0].dataset))
            return str(runtime.flow_run.id)

    with paused("near"):
        parent = two_datasets()
    expected = [("near", "Cancelled"), ("far", "Completed"), ("far", "Completed")]
    assert where(config.root) == expected
    with get_client(sync_client=True) as client:
        [page] = client.read_artifacts(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[parent])))
    assert [(row["pool"], row["ended as"]) for row in json.loads(page.data)] == expected
    of_run = f"tags.`forge.run_uri` = '{config.root}/run'"
    tracked = mlflow.search_runs(search_all_experiments=True, filter_string=of_run)
    assert tracked["metrics.placement/redirects"].tolist() == [2]


def test_of_jobs_sent_at_once_none_waits_for_another(workers: dict[str, Service], seaweed_s3: str):
    config = placed_config(f"{seaweed_s3}/at-once", {"dataset": POOLS}, redirect_after_seconds=2)
    placement = Placement(config.placement, logging.getLogger("placement"))
    jobs = [Plan(config, "run").dataset(dataset) for dataset in (config.sft.dataset, config.evals[0].dataset)]
    with paused("near"):
        made = placement.run(jobs, time_limit_seconds=600)
    assert [manifest.uri for manifest in made if isinstance(manifest, Manifest)] == [job.output for job in jobs]
    # Both have left `near` before either is made.
    assert [row["pool"] for row in placement.rows] == ["near", "near", "far", "far"]


def test_a_stage_goes_on_elsewhere_when_its_flow_run_crashes_and_smaller_when_it_lacked_memory(
    workers: dict[str, Service], seaweed_s3: str
):
    config = placed_config(
        f"{seaweed_s3}/crashed",
        {"dataset": POOLS},
        Fault(job="dataset", action="kill_flow", at="begin"),
        Fault(job="dataset", action="out_of_memory", at="begin"),
    )
    placed(config, "run")
    assert where(config.root) == [("near", "Crashed"), ("far", "OutOfMemory"), ("near", "Completed")]
    assert [run.parameters["job"]["memory_halvings"] for run in children(config.root)] == [0, 0, 1]


def test_a_lost_parent_finds_its_stage_running_and_ends_it_when_it_is_cancelled(
    workers: dict[str, Service], seaweed_s3: str
):
    deploy_parent()
    hang = Fault(job="dataset", action="hang", at="begin")
    config = placed_config(f"{seaweed_s3}/lost", {"dataset": ("far",)}, hang)
    parent = start_run(config, "run", deployment="placed/near")
    [stage_process] = processes_of(workers["far"], "forge_core.stages")
    [flow_process] = processes_of(workers["near"], "prefect.engine")
    flow_process.send_signal(signal.SIGKILL)
    parent = finished(parent)
    assert parent.state_name == "Crashed"
    time.sleep(3)  # the worker may still have a word to say about the run that it has lost
    set_state(parent, AwaitingRetry())
    wait_for_log(parent, "found again in pool far")
    assert where(config.root) == [("far", "Running")]
    set_state(parent, Cancelling())
    [child] = children(config.root)
    assert finished(child).state_name == "Cancelled"
    assert finished(read(parent)).state_name == "Cancelled"
    assert not psutil.wait_procs([stage_process], timeout=30)[1]


@contextmanager
def paused(pool: str) -> Iterator[None]:
    """A work pool that gives nothing to its workers."""
    with get_client(sync_client=True) as client:
        client.update_work_pool(pool, WorkPoolUpdate(is_paused=True))
        try:
            yield
        finally:
            client.update_work_pool(pool, WorkPoolUpdate(is_paused=False))


def deploy_parent() -> None:
    """The deployment of tests/flows/placed.py in the pool `near`."""
    with get_client(sync_client=True) as client:
        client.create_deployment(
            flow_id=client.create_flow(placed),
            name="near",
            entrypoint="tests.flows.placed.placed",
            pull_steps=[PULL],
            work_pool_name="near",
            parameter_openapi_schema=parameter_schema(placed).model_dump_for_openapi(),
        )


def processes_of(worker: Service, module: str) -> list[psutil.Process]:
    """The processes of a worker that run a module, as soon as there are any."""
    while True:  # the test's own time limit ends this
        found = psutil.Process(worker.pid).children(recursive=True)
        if running := [process for process in found if module in process.cmdline()]:
            return running
        time.sleep(0.2)


def wait_for_log(run: FlowRun, words: str) -> None:
    """Return when a flow run has logged these words."""
    of_run = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id]))
    with get_client(sync_client=True) as client:
        while not any(words in log.message for log in client.read_logs(of_run)):  # the test's own time limit ends this
            time.sleep(0.5)


def read(run: FlowRun) -> FlowRun:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(run.id)


def set_state(run: FlowRun, state) -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, state, force=True)
