"""The reference policy: log-probs of stored rollouts, by a process of its own or by the trainer, standing in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forge_core import artifacts
from forge_core.artifacts import Ref
from forge_core.batching import pack_sequences
from forge_core.config import OptimizerConfig, TrainerConfig
from forge_core.examples import Example, Message
from forge_core.jobs import ReferenceJob
from forge_core.losses import grpo
from forge_core.rollouts import Rollouts, RolloutTexts, load_reference_logprobs
from forge_core.stages import reference
from forge_core.stages.learner import Learner
from forge_core.stages.workspace import Workspace
from forge_core.trainer.policy_trainer import PolicyTrainer

NOTHING: dict = {"job": {}, "inputs": {}, "summary": {}, "software": {}, "timings": {}, "job_digest": "0"}
TRAINER = TrainerConfig(row_tokens=32)


@pytest.fixture
def rollouts(sequences) -> Rollouts:
    """The documents of this folder's tests as completions after prompts of two tokens."""
    example = Example(id="x", messages=(Message(role="user", content="?"),))
    count = len(sequences)
    return Rollouts(
        token_ids=torch.cat([sequence.token_ids for sequence in sequences]),
        generator_logprobs=torch.cat([sequence.generator_logprobs for sequence in sequences]),
        offsets=torch.tensor([0, *(len(sequence.token_ids) for sequence in sequences)]).cumsum(0),
        prompt_lengths=torch.full((count,), 2),
        group_ids=torch.arange(count),
        texts=tuple(RolloutTexts(example, "", "stop") for _ in sequences),
    )


@pytest.fixture
def make_job(tmp_path: Path, rollouts: Rollouts, qwen3: Path) -> Callable[..., ReferenceJob]:
    """Jobs for the log-probs of the tiny policy."""
    files = tmp_path / "files"
    files.mkdir()
    rollouts.save(files)
    stored = artifacts.commit(files, (tmp_path / "rollouts").as_uri(), kind="rollouts", **NOTHING).ref
    policy = artifacts.commit(qwen3, (tmp_path / "policy").as_uri(), kind="policy", **NOTHING).ref

    def make(name: str, runs_on: str = "own", temperature: float = 1.0) -> ReferenceJob:
        return ReferenceJob.model_validate(
            {
                "output": (tmp_path / name).as_uri(),
                "policy": policy,
                "rollouts": stored,
                "temperature": temperature,
                "trainer": TRAINER,
                "seed": 0,
                "runs_on": runs_on,
            }
        )

    return make


@pytest.fixture
def workspace(tmp_path: Path):
    made = Workspace(tmp_path / "scratch")
    made.scratch.mkdir()
    yield made
    if "learner" in made.held:
        made.held["learner"].trainer.close()


def run(job: ReferenceJob, workspace: Workspace) -> tuple[Tensor, dict[str, float]]:
    workspace.begin_job(job)
    manifest = reference.run(job, workspace)
    assert manifest is not None
    return load_reference_logprobs(workspace.fetch(manifest.ref)[1]), manifest.summary


def in_training(workspace: Workspace, qwen3: Path, rollouts: Rollouts) -> PolicyTrainer:
    """A warm trainer of the same shape whose weights and optimizer have moved."""
    optimizer = OptimizerConfig(learning_rate=1e-2)
    trainer = PolicyTrainer.open(
        qwen3, trainer=TRAINER, optimizer=optimizer, total_steps=9, seed=0, scratch=workspace.scratch / "trainer"
    )
    workspace.held["learner"] = Learner(trainer, TRAINER, Ref(kind="policy", uri="memory://p", digest="f" * 64))
    step(trainer, rollouts)
    return trainer


def step(trainer: PolicyTrainer, rollouts: Rollouts) -> dict[str, float]:
    sequences = [rollouts.sequence(index, advantage=(-1) ** index) for index in range(len(rollouts))]
    return trainer.train_step(pack_sequences(sequences, 32), grpo)


def test_log_probs_are_those_of_the_policy_at_the_temperature_and_lie_where_the_rollouts_tokens_lie(
    make_job, workspace, rollouts, qwen3, transformers_logits
):
    found, _ = run(make_job("a", temperature=0.7), workspace)
    assert found.shape == rollouts.token_ids.shape
    for index in range(len(rollouts)):
        tokens = slice(int(rollouts.offsets[index]), int(rollouts.offsets[index + 1]))
        ids = rollouts.token_ids[tokens]
        logprobs = (transformers_logits(qwen3, ids) / 0.7).log_softmax(-1)
        expected = logprobs[:-1].gather(-1, ids[1:, None]).squeeze(-1)
        assert found[tokens][:2].tolist() == [0, 0]  # the prompt
        torch.testing.assert_close(found[tokens][2:], expected[1:], atol=1e-4, rtol=0)


def test_at_step_0_the_distance_from_the_reference_policy_is_nothing(make_job, workspace, rollouts, tmp_path: Path):
    logprobs, _ = run(make_job("a"), workspace)
    files = tmp_path / "own"
    files.mkdir()
    own = Rollouts(**(vars(rollouts) | {"generator_logprobs": logprobs}))
    own.save(files)
    stored = artifacts.commit(files, (tmp_path / "own-rollouts").as_uri(), kind="rollouts", **NOTHING).ref
    _, summary = run(make_job("b").model_copy(update={"rollouts": stored}), workspace)
    assert (summary["kl/sampled_k1"], summary["kl/sampled_k3"]) == (0, 0)


def test_a_reference_policy_is_loaded_once(make_job, workspace, monkeypatch: pytest.MonkeyPatch):
    loads: list[Path] = []
    load = PolicyTrainer.load_policy
    monkeypatch.setattr(PolicyTrainer, "load_policy", lambda self, path: (loads.append(path), load(self, path))[1])
    first, _ = run(make_job("a"), workspace)
    again, _ = run(make_job("b"), workspace)
    assert len(loads) == 1
    assert torch.equal(first, again)


def test_the_trainer_stands_in_with_the_same_bits_and_goes_on_as_if_nothing_had_been(
    make_job, workspace, rollouts, qwen3, exported, digest
):
    expected, _ = run(make_job("a"), workspace)
    workspace.held.pop("learner").trainer.close()

    trainer = in_training(workspace, qwen3, rollouts)
    undisturbed = (step(trainer, rollouts), step(trainer, rollouts), digest(exported(trainer, qwen3)))
    trainer.close()

    trainer = in_training(workspace, qwen3, rollouts)
    steps = []
    for name in ("b", "c"):
        found, _ = run(make_job(name, runs_on="trainer"), workspace)
        assert torch.equal(found, expected)
        steps.append(step(trainer, rollouts))
    assert (*steps, digest(exported(trainer, qwen3))) == undisturbed
    assert workspace.held["learner"].trainer is trainer


def test_a_cold_trainer_takes_the_reference_policy_from_its_artifact(make_job, workspace):
    expected, _ = run(make_job("a"), workspace)
    workspace.held.pop("learner").trainer.close()
    workspace.held.clear()
    found, _ = run(make_job("b", runs_on="trainer"), workspace)
    assert torch.equal(found, expected)
    assert workspace.held["learner"].policy is None  # so that no update takes its optimizer for its own
