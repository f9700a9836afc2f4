"""Three nights: the first publishes, the second finds nothing new, the third goes on from the champion."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from deployments.local_service import Service
from flows.nightly import COLD, nightly
from forge_core import artifacts, publication
from forge_core.artifacts import Ref
from forge_core.config import PostTrainConfig
from forge_core.jobs import EvaluateJob, StageJob
from forge_core.manifests import find
from forge_core.nightly import from_champion
from forge_core.operation import NotifyConfig
from forge_core.plan import Plan
from forge_core.runs import read_run
from forge_core.side_jobs import overlap_job
from tests.pipeline import tiny_config
from tests.prunable_runs import commit
from tests.webhook import Webhook

pytestmark = pytest.mark.slow


NOTHING_FOUND = ("exact", "near", "fraction")


def store_night(config: PostTrainConfig, run_id: str) -> None:
    """What the engines would make in a night, so that the flow finds it and starts none of them."""
    plan = Plan(from_champion(config, run_id), run_id)

    def run(job: StageJob, summary: dict | None = None) -> Ref:
        return commit(job, job.output, job.kind, job.inputs, summary)

    [evaluation] = config.evals
    start = run(plan.start())
    examples, problems = run(plan.dataset(config.sft.dataset)), run(plan.dataset(evaluation.dataset))
    run(overlap_job(plan, examples, [problems]), {f"overlap/heldout/{name}": 0.0 for name in NOTHING_FOUND})
    policy = run(plan.sft(start, examples), {"sft/first_loss": 2.0, "sft/loss": 1.0})
    for ref in (start, policy):
        store_evaluation(plan.evaluate(ref, problems, evaluation))


def store_evaluation(job: EvaluateJob) -> None:
    """One of two problems is right."""
    rows = [
        {"id": name, "answer": "1", "is_right": is_right, "num_right_samples": 0, "num_samples": 1}
        for name, is_right in (("a", True), ("b", False))
    ]
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        artifacts.commit(
            Path(name),
            job.output,
            kind=job.kind,
            job=job.as_json(),
            job_digest=job.digest(),
            inputs=job.inputs,
            summary={f"eval/heldout/accuracy{end}": 0.5 for end in ("", "_low", "_high")},
            software=job.software,
            timings={},
        )


def test_three_nights(prefect_server: Service, webhook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # MLflow's local file
    monkeypatch.setenv("NIGHTS_WEBHOOK", webhook.url)
    config = tiny_config(str(tmp_path), name="nights", keep_warm=COLD, notify=NotifyConfig(url_env="NIGHTS_WEBHOOK"))
    config = config.model_copy(update={"grpo": config.grpo.model_copy(update={"num_iterations": 0})})
    store_night(config, "first")
    assert nightly(config, run_id="first")["eval/heldout/accuracy"] == 0.5
    champion = publication.champion(config.root, "nights")
    assert champion is not None
    assert champion.policy == find(f"{config.root}/first")

    store_night(config, "second")
    second = nightly(config, run_id="second", return_state=True)
    assert (second.type.value, second.name) == ("COMPLETED", "Skipped")
    assert second.message == "nothing new: first has learned from the same data with the same settings"
    assert publication.champion(config.root, "nights") == champion

    examples = config.sft.dataset.model_copy(update={"kwargs": {"max_number": 5}})
    changed = config.model_copy(update={"sft": config.sft.model_copy(update={"dataset": examples})})
    store_night(changed, "third")
    assert nightly(changed, run_id="third")["eval/heldout/accuracy"] == 0.5
    assert read_run(f"{config.root}/third").settings().policy.uri == champion.policy.uri
    newest = publication.champion(config.root, "nights")
    assert newest is not None
    assert (newest.version, newest.previous, newest.run_id) == (2, 1, "third")
    told = [(one["run_id"], one["event"]) for one in webhook.received]
    assert told == [("first", "published"), ("second", "skipped"), ("third", "published")]
