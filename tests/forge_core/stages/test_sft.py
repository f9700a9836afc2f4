"""Supervised fine-tuning in this process: what decides its end, its weights, and where it goes on after a loss."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from forge_core import storage
from forge_core.artifacts import Manifest, Ref
from forge_core.config import FreshPolicyConfig, PolicyConfig, SftRunConfig
from forge_core.data_config import DatasetConfig
from forge_core.faults import Fault, JobFaults
from forge_core.fit_config import SftConfig, ValidationConfig
from forge_core.jobs import SftJob
from forge_core.plan import Plan
from forge_core.stages import dataset, sft, start
from forge_core.stages.workspace import Workspace
from forge_core.trainer_config import OptimizerConfig, TrainerConfig

SHAPE = FreshPolicyConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32)
SUMS = DatasetConfig(fn="arithmetic", kwargs={"max_number": 4})
FAST = OptimizerConfig(learning_rate=1e-2, warmup_steps=2)

Tune = Callable[..., Manifest]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def open_workspace(tmp_path: Path) -> Iterator[Callable[[], Workspace]]:
    """A workspace as a stage process has it; the trainer of the one before is closed."""
    opened: list[Workspace] = []

    def close() -> None:
        if opened and "learner" in (held := opened.pop().held):
            held["learner"].trainer.close()

    def open_() -> Workspace:
        close()
        scratch = tmp_path / f"scratch{len(list(tmp_path.glob('scratch*')))}"
        scratch.mkdir()
        opened.append(Workspace(scratch))
        return opened[-1]

    yield open_
    close()


@pytest.fixture
def job_for(tmp_path: Path, open_workspace: Callable[[], Workspace]) -> Callable[..., SftJob]:
    """The SFT job of a run of its own, its inputs committed."""

    def make(run_id: str, trainer: TrainerConfig | None = None, **settings) -> SftJob:
        config = SftRunConfig(
            root=str(tmp_path / "store"),
            policy=PolicyConfig(fresh=SHAPE),
            trainer=trainer or TrainerConfig(row_tokens=128),
            sft=SftConfig(**{"dataset": SUMS, "num_steps": 8, "batch_size": 5, "optimizer": FAST} | settings),
        )
        plan, workspace = Plan(config, run_id), open_workspace()

        def commit(stage, job) -> Ref:
            workspace.begin_job(job)
            return stage.run(job, workspace).ref

        policy, examples = commit(start, plan.start()), commit(dataset, plan.dataset(SUMS))
        validation = config.sft.validation
        heldout = commit(dataset, plan.dataset(validation.dataset)) if validation else None
        return plan.sft(policy, examples, heldout)

    return make


@pytest.fixture
def tune(open_workspace: Callable[[], Workspace]) -> Tune:
    """Runs a job in a workspace of its own, as a fresh process would."""

    def run(job: SftJob) -> Manifest:
        workspace = open_workspace()
        workspace.begin_job(job)
        manifest = sft.run(job, workspace)
        workspace.finish_job()
        assert manifest is not None
        return manifest

    return run


def heldout(**settings) -> ValidationConfig:
    dataset = DatasetConfig(fn="arithmetic", kwargs={"max_number": 4, "split": "test"})
    return ValidationConfig(**{"dataset": dataset, "num_examples": 5, "every": 2} | settings)


def history(manifest: Manifest) -> list[dict]:
    return [json.loads(line) for line in storage.read_bytes(f"{manifest.files_uri}/history.jsonl").splitlines()]


def weights(manifest: Manifest) -> str:
    return manifest.sha256_of("model.safetensors")


def train_states(job: SftJob) -> list[str]:
    return storage.list_names(job.output.rpartition("/policies")[0] + "/train_states")


def test_epochs_take_every_example_so_many_times(job_for, tune):
    job = job_for("epochs", num_epochs=2, batch_size=6)
    manifest = tune(job)
    num_examples = len(storage.read_bytes(f"{files_of(job.dataset)}/examples.jsonl").splitlines())
    assert manifest.summary["sft/steps"] == -(-2 * num_examples // 6)
    per_example = history(manifest)[0]["tokens/trained"] / 6  # "2" and its end: the sums have one digit or two
    trained = sum(step["tokens/trained"] for step in history(manifest))
    assert 2 * num_examples <= trained / 2 <= 3 * num_examples
    assert per_example >= 2


def test_validation_loss_falls_and_the_curve_says_so(job_for, tune):
    manifest = tune(job_for("curve", num_steps=12, batch_size=16, validation=heldout(every=4)))
    curve = [line["validation/loss"] for line in history(manifest) if "validation/loss" in line]
    assert [line["step"] for line in history(manifest) if "validation/loss" in line] == [0, 4, 8, 12]
    assert curve[0] == pytest.approx(manifest.summary["sft/first_validation_loss"])
    assert curve[-1] < curve[0]
    assert manifest.summary["sft/validation_loss"] == min(curve)


def test_best_weights_are_published_and_patience_ends_the_training(job_for, tune):
    # At such a rate the loss only grows, so the best weights are those of the first validation.
    wild = OptimizerConfig(learning_rate=3.0)
    job = job_for("wild", num_steps=20, optimizer=wild, validation=heldout(patience=2))
    manifest = tune(job)
    assert manifest.summary["sft/best_step"] == 0
    assert manifest.summary["sft/steps"] == 4  # two validations in a row without a lower loss
    assert weights(manifest) == source_weights(job)
    last = tune(job_for("wild-last", num_steps=20, optimizer=wild, validation=heldout(patience=2, keep="last")))
    assert weights(last) != weights(manifest)


def test_validating_changes_nothing_but_what_is_known(job_for, tune):
    plain = tune(job_for("plain"))
    assert weights(tune(job_for("watched", validation=heldout(keep="last")))) == weights(plain)
    assert weights(tune(job_for("short-pause", checkpoint_every=3))) == weights(plain)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_stage_that_dies_goes_on_from_its_snapshot_to_the_same_bits(job_for, tune, tmp_path, lora):
    settings = {"num_steps": 12, "checkpoint_every": 2, "validation": heldout(every=3, patience=3)}
    trainer = TrainerConfig(row_tokens=128, lora=lora)
    whole = tune(job_for("whole", trainer, **settings))

    job = job_for("torn", trainer, **settings)
    faults = JobFaults(record=f"{tmp_path}/record", faults=(Fault(job="sft", at="work", action="out_of_memory"),))
    with pytest.raises(MemoryError):
        tune(job.model_copy(update={"injected": faults}))
    older, newest = train_states(job)  # two, should the newest be damaged
    assert [older[-10:], newest[-10:]] == ["step000004", "step000006"]
    damage(job, newest)
    manifest = tune(job.model_copy(update={"injected": faults}))

    assert [file.sha256 for file in manifest.files] == [file.sha256 for file in whole.files]
    events = [json.loads(path.read_text()) for path in sorted((tmp_path / "record" / "events").iterdir())]
    assert [event.get("of", "")[-10:] for event in events if event["event"] == "resume"] == ["step000004"]
    assert train_states(job) == []


def test_snapshot_of_other_settings_is_not_gone_on_from(job_for, tune, tmp_path):
    job = job_for("changed", num_steps=12, checkpoint_every=2)
    faults = JobFaults(record=f"{tmp_path}/record", faults=(Fault(job="sft", at="work", action="out_of_memory"),))
    with pytest.raises(MemoryError):
        tune(job.model_copy(update={"injected": faults}))
    slower = SftConfig(**job.sft.model_dump() | {"optimizer": OptimizerConfig(learning_rate=1e-3)})
    changed = tune(job.model_copy(update={"sft": slower}))
    again = job_for("from-scratch", num_steps=12, optimizer=OptimizerConfig(learning_rate=1e-3))
    assert weights(changed) == weights(tune(again))
    assert train_states(job) == []


def files_of(ref: Ref) -> str:
    return Manifest.model_validate_json(storage.read_bytes(f"{ref.uri}/manifest.json")).files_uri


def source_weights(job: SftJob) -> str:
    return Manifest.model_validate_json(storage.read_bytes(f"{job.policy.uri}/manifest.json")).sha256_of(
        "model.safetensors"
    )


def damage(job: SftJob, name: str) -> None:
    folder = Path(storage.local_path(job.output.rpartition("/policies")[0] + f"/train_states/{name}") or "")
    victim = next(path for path in folder.rglob("*.distcp"))
    content = bytearray(victim.read_bytes())
    content[-5] ^= 1
    victim.write_bytes(content)
