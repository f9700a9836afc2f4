"""The command `forge` as people and scripts call it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli import doctor
from deployments.cli.app import app
from deployments.cli.compare import verdict
from deployments.cli.running import recipe_of
from deployments.local_service import Service, free_port
from forge_core import artifacts, publication, storage
from forge_core.artifacts import Ref
from forge_core.config import GrpoRunConfig, PostTrainConfig, RunConfig, SftRunConfig
from forge_core.gates import GatesConfig
from forge_core.manifests import find
from forge_core.plan import Plan
from forge_core.run_status import run_status
from forge_core.runs import write_run
from tests.pipeline import tiny_config
from tests.stored_runs import store_run

REPO = Path(__file__).parents[2]
NUM_PROBLEMS = 50
COMMANDS = (
    *("doctor", "run", "status", "compare", "eval-harness"),
    *("lineage", "publish", "rollback", "history", "gc"),
)


@pytest.fixture(autouse=True)
def no_tracking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test's MLflow server is none of these commands' business."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def forge(*arguments: str) -> str:
    """What the command prints; its exit status is 0."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def stored_run(root: Path, run_id: str, num_right: int, **changes) -> Plan:
    """A run as its artifacts alone, with an evaluation of its newest policy in which the first problems are right."""
    config = tiny_config(str(root), **changes)
    plan = store_run(config, run_id)
    write_run(plan.run_uri, run_id, config)
    policy, problems = find(plan.run_uri), artifacts.read_manifest(plan.dataset(config.grpo.dataset).output)
    assert problems is not None
    evaluate = plan.evaluate(policy, problems.ref, config.evals[0])
    rows = [json.dumps({"id": str(number), "is_right": number < num_right}) for number in range(NUM_PROBLEMS)]
    share = num_right / NUM_PROBLEMS
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "samples.jsonl").write_text("\n".join(rows))
        artifacts.commit(
            Path(name),
            evaluate.output,
            kind="eval",
            job=evaluate.as_json(),
            job_digest=evaluate.digest(),
            inputs=evaluate.inputs,
            summary={
                "eval/heldout/accuracy": share,
                "eval/heldout/accuracy_low": share - 0.1,
                "eval/heldout/accuracy_high": share + 0.1,
                "eval/heldout/num_examples": NUM_PROBLEMS,
            },
            software={},
            timings={},
        )
    return plan


def test_help_and_completion_import_neither_prefect_nor_mlflow_nor_torch():
    program = (
        "import sys\nfrom deployments.cli.app import main\nsys.argv = ['forge', '--help']\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "assert not {'prefect', 'mlflow', 'torch', 'pandas', 'numpy', 'matplotlib'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert f" {command} " in done.stdout


def test_what_a_user_can_mend_is_one_line_and_status_1(tmp_path: Path):
    command = [sys.executable, "-m", "deployments.cli", "status", str(tmp_path / "no-run")]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"forge: {(tmp_path / 'no-run').as_uri()} has no run.json; give the URI of a run, " + (
        "{root}/{run_id}\n"
    )


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("quickstart", PostTrainConfig),
        ("smollm2_arithmetic", PostTrainConfig),
        ("sft", SftRunConfig),
        ("grpo", GrpoRunConfig),
        ("evaluate", RunConfig),
    ],
)
def test_a_config_asks_for_its_flow_by_its_sections(name: str, recipe: type[RunConfig]):
    assert recipe_of(REPO / "deployments" / "configs" / f"{name}.yaml") is recipe


def test_status_shows_iterations_and_evaluations_of_a_run(tmp_path: Path):
    plan = stored_run(tmp_path, "run", num_right=30)
    shown = forge("status", plan.run_uri)
    assert "evals/v0004/heldout 0 s ago" in shown
    assert "60.0%" in shown
    assert "50.0% to 70.0%" in shown
    found = json.loads(forge("status", plan.run_uri, "--json"))
    assert found == run_status(plan.run_uri).model_dump(mode="json")
    assert [row["reward/mean"] for row in found["iterations"]] == [0.5, 0.5, 0.5]
    assert found["evaluations"]["v0004/heldout"]["eval/heldout/accuracy"] == 0.6


def test_compare_pairs_the_newest_policies_and_writes_a_plot(tmp_path: Path):
    first = stored_run(tmp_path, "first", num_right=40)
    second = stored_run(tmp_path, "second", num_right=20, seed=1)
    plot = tmp_path / "plots" / "both.png"
    shown = forge("compare", first.run_uri, second.run_uri, "--plot", str(plot))
    assert "80.0% (v0004)" in shown
    assert "-40.0%" in shown
    assert "a is better" in shown
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = json.loads(forge("compare", second.run_uri, first.run_uri, "--plot", str(plot), "--json"))
    accuracy = found["evaluations"]["heldout"]["accuracy"]
    assert accuracy["difference"] == pytest.approx(0.4)
    assert accuracy["low"] > 0
    assert (accuracy["num_better"], accuracy["num_worse"]) == (20, 0)
    assert accuracy["p_value"] == pytest.approx(2 / 2**20)
    assert found["curves"] == {"reward/mean": [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]}


def test_compare_takes_policies_and_says_which_settings_differ(tmp_path: Path):
    config = tiny_config(str(tmp_path))
    first = stored_run(tmp_path, "first", num_right=40)
    longer = config.evals[0].model_copy(update={"max_tokens": 5})
    second = stored_run(tmp_path, "second", num_right=20, evals=(longer,))
    plot = ("--plot", str(tmp_path / "both.png"))
    shown = forge("compare", f"{first.run_uri}/policies/v0004", second.run_uri, *plot)
    assert "evaluation.max_tokens (4 there, 5 here)" in shown
    same = json.loads(forge("compare", f"{first.run_uri}/policies/v0004", first.run_uri, *plot, "--json"))
    assert same["evaluations"]["heldout"]["accuracy"]["difference"] == 0
    assert same["curves"] == {}
    with pytest.raises(ValueError, match="has no evaluation of v0001; it has v0004/heldout"):
        forge("compare", f"{first.run_uri}/policies/v0001", second.run_uri, *plot)


def test_a_difference_whose_interval_holds_zero_is_none():
    assert [verdict(0.01, 0.2), verdict(-0.2, -0.01), verdict(-0.1, 0.1)] == [
        "b is better",
        "a is better",
        "not distinguishable",
    ]


def test_publish_goes_through_the_gates_and_rollback_goes_back(tmp_path: Path):
    gates = GatesConfig(max_accuracy_drop=0.05)
    good = stored_run(tmp_path, "good", num_right=40, gates=gates)
    worse = stored_run(tmp_path, "worse", num_right=20, gates=gates, seed=1)
    root = str(tmp_path)
    assert "tiny -> version 1" in forge("publish", good.run_uri)

    with pytest.raises(ValueError, match=r"tiny keeps its champion: heldout: accuracy 0\.400 .* 0\.800"):
        forge("publish", worse.run_uri)
    assert find(f"{root}/published/tiny") == find(good.run_uri)

    forced = json.loads(forge("publish", worse.run_uri, "--force", "--json"))
    assert (forced["version"], forced["gates"][0]["has_passed"]) == (2, False)
    assert find(f"{root}/published/tiny") == find(worse.run_uri)
    assert "gates failed" in forge("history", "tiny", "--root", root)

    assert "restores version 1" in forge("rollback", "tiny", "--root", root)
    assert find(f"{root}/published/tiny") == find(good.run_uri)
    assert [one["version"] for one in json.loads(forge("history", "tiny", "--root", root, "--json"))] == [3, 2, 1]
    with pytest.raises(ValueError, match=r"published as version 2 before.* --to 2"):
        forge("publish", worse.run_uri, "--force")


def test_lineage_and_gc_say_what_their_modules_say(tmp_path: Path):
    plan = stored_run(tmp_path, "run", num_right=1)
    assert "policies/v0004" in forge("lineage", plan.run_uri)
    assert Ref.model_validate(json.loads(forge("lineage", plan.run_uri, "--json"))["artifact"]) == find(plan.run_uri)
    assert "nothing was deleted; add --delete" in forge("gc", str(tmp_path))


def test_doctor_names_what_is_wrong_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    checks = {check.what: check for check in doctor.examine(str(tmp_path / "file" / "store"))}
    assert checks[f"storage {tmp_path}/file/store"].outcome == "failed"
    assert "cannot be written" in checks[f"storage {tmp_path}/file/store"].found
    assert checks["mlflow"].outcome == "warning"
    assert checks["torch"].found.startswith("2.13")
    assert checks["packages"].found.endswith("as asked for")
    assert doctor.exit_code(list(checks.values())) == 1
    assert all(check.remedy for check in checks.values() if check.outcome != "ok")
    assert storage.list_names(str(tmp_path)) == ["file"]


@pytest.mark.slow
def test_doctor_reads_the_server_and_its_pools(prefect_server: Service, tmp_path: Path):
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate

    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="idle", type="process"), overwrite=True)
    checks = {check.what: check for check in doctor._prefect()}
    assert checks["prefect"].found == f"{prefect_server.url}, version 3.7.7"
    assert checks["pool idle"].found == "process, 0 of 0 workers alive"
    assert checks["pool idle"].remedy == "prefect worker start --pool idle"


def test_a_name_without_a_history_cannot_be_rolled_back(tmp_path: Path):
    with pytest.raises(artifacts.ArtifactError, match="published/none has no history"):
        forge("rollback", "none", "--root", str(tmp_path))
    assert publication.versions(str(tmp_path), "none") == []


def test_serving_a_name_that_was_never_published_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match="has no history; check the name and --root"):
        CliRunner().invoke(app, ["serve", "quickstart", "--root", str(tmp_path)], catch_exceptions=False)
