"""An update of stored rollouts by a real trainer: epochs, proximal log-probs, corrections, entropy, exact replay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forge_core import artifacts
from forge_core.alarms import DEFAULT_ALARMS, find_alarms
from forge_core.artifacts import Ref
from forge_core.batching import TrainSequence, pack_sequences
from forge_core.config import OptimizerConfig, TrainerConfig
from forge_core.examples import Example, Message
from forge_core.jobs import UpdateJob
from forge_core.rollouts import Rollouts, RolloutTexts, Scores
from forge_core.settings import FunctionConfig
from forge_core.stages.update import apply_update
from forge_core.stages.workspace import Workspace
from forge_core.trainer.policy_trainer import PolicyTrainer
from forge_core.update_config import CorrectionConfig

LENGTHS = [9, 4, 6, 12, 5, 7, 3, 10]  # completions after prompts of 3 tokens, two groups of four
ADVANTAGES = [1.2, -0.4, 0.3, -1.1, -0.6, 0.9, -0.8, 0.5]
ROW_TOKENS = 32


@pytest.fixture
def sampled(open_trainer, qwen3) -> list[TrainSequence]:
    """Documents with the log-probs that the trainer gives them: what a generator without rounding would record."""
    trainer, generator = open_trainer(qwen3), torch.Generator().manual_seed(3)
    documents = [
        TrainSequence(
            token_ids=torch.randint(0, 37, (3 + length,), generator=generator),
            loss_mask=torch.arange(3 + length) >= 3,
            generator_logprobs=torch.zeros(3 + length),
        )
        for length in LENGTHS
    ]
    batch = pack_sequences(documents, ROW_TOKENS)
    logprobs = trainer.logprobs(batch)
    for index, document in enumerate(documents):
        document.generator_logprobs[1:] = logprobs[batch.sequence_ids == index][:-1]
    return documents


@pytest.fixture
def update(open_trainer, qwen3, sampled, tmp_path: Path, exported, digest) -> Callable[..., tuple[dict, str]]:
    """Applies one update to the tiny policy: its summary, and the digest of the weights after it."""

    def apply(
        *, mismatch: float = 0.0, num_completions: int = 8, num_kept: int = 8, policy: Path = qwen3, **settings
    ) -> tuple[dict, str]:
        trainer: PolicyTrainer = open_trainer(policy, optimizer=OptimizerConfig(learning_rate=3e-3))
        place = tmp_path / f"{mismatch}-{num_completions}-{num_kept}"
        scored = _commit(place, sampled[:num_completions], mismatch, num_kept)
        job = UpdateJob(
            output="memory://policies/v0001",
            policy=Ref(kind="policy", uri="memory://policies/v0000", digest="0" * 64),
            scored=(scored,),
            source_sha256="0",
            optimizer=OptimizerConfig(learning_rate=3e-3),
            total_steps=0,
            temperature=1.0,
            trainer=TrainerConfig(row_tokens=ROW_TOKENS),
            seed=0,
            **settings,
        )
        workspace = Workspace(tmp_path / "scratch")
        workspace.scratch.mkdir(exist_ok=True)
        workspace.begin_job(job)
        return apply_update(trainer, job, workspace), digest(exported(trainer, qwen3))

    return apply


def _commit(place: Path, documents: list[TrainSequence], mismatch: float, num_kept: int) -> Ref:
    """Scored rollouts whose recorded log-probs are off by up to `mismatch`; the first ones are kept."""
    uris = [(place / name).as_uri() for name in ("rollouts", "scored")]
    if (found := artifacts.read_manifest(uris[1])) is not None:
        return found.ref
    noise = torch.Generator().manual_seed(11)
    example = Example(id="x", messages=(Message(role="user", content="?"),), answer="")
    logprobs = torch.cat([document.generator_logprobs for document in documents])
    count = len(documents)
    rollouts = Rollouts(
        token_ids=torch.cat([document.token_ids for document in documents]),
        generator_logprobs=logprobs + mismatch * (2 * torch.rand(len(logprobs), generator=noise) - 1),
        offsets=torch.tensor([0, *(len(document.token_ids) for document in documents)]).cumsum(0),
        prompt_lengths=torch.full((count,), 3),
        group_ids=torch.arange(count) // 4,
        texts=tuple(RolloutTexts(example, "", "stop") for _ in documents),
    )
    scores = Scores(
        rewards=torch.zeros(count, 1),
        total=torch.zeros(count),
        advantages=torch.tensor(ADVANTAGES[:count]),
        keep=torch.arange(count) < num_kept,
    )
    nothing: dict = {"job": {}, "summary": {}, "software": {}, "timings": {}, "job_digest": "0"}
    inputs: dict[str, Ref] = {}
    for uri, content in zip(uris, (rollouts, scores), strict=True):
        (place / "files" / uri[-5:]).mkdir(parents=True)
        content.save(place / "files" / uri[-5:])
        kind = uri.rpartition("/")[2]
        ref = artifacts.commit(place / "files" / uri[-5:], uri, kind=kind, inputs=inputs, **nothing).ref
        inputs = {"rollouts": ref}
    return ref


def test_one_step_from_the_policy_that_sampled_has_ratio_one_and_clips_nothing(update):
    for proximal in ("generator", "trainer"):
        summary, _ = update(proximal=proximal)
        assert (summary["ratio/mean"], summary["ratio/max"], summary["ratio/effective_sample_size"]) == (1, 1, 1)
        assert (summary["loss/clip_fraction"], summary["kl/behavior"], summary["update/steps"]) == (0, 0, 1)


def test_the_trainers_own_log_probs_take_the_mismatch_out_of_the_ratio(update):
    summary, _ = update(mismatch=0.5, proximal="generator")
    assert summary["ratio/max"] > 1.4
    assert summary["loss/clip_fraction"] > 0.1
    summary, _ = update(mismatch=0.5, proximal="trainer")
    assert (summary["ratio/mean"], summary["ratio/max"], summary["loss/clip_fraction"]) == (1, 1, 0)
    assert 1.4 < summary["mismatch_ratio/max"] < 1.65  # e^.5
    assert 0.02 < summary["kl/mismatch"] < 0.1  # about the mean of d^2 / 2, d uniform within .5: .042
    assert summary["mismatch_ratio/effective_sample_size"] < 0.99


def test_every_epoch_is_compared_with_the_policy_the_update_started_from(update):
    one, first = update(minibatches=2, proximal="trainer")
    three, third = update(minibatches=2, epochs=3, proximal="trainer")
    assert (one["update/steps"], three["update/steps"]) == (2, 6)
    assert three["tokens/trained"] == 3 * sum(LENGTHS)
    assert first != third
    assert three["ratio/max"] > one["ratio/max"] > 1  # the second minibatch already sees a moved policy
    assert abs(three["kl/mismatch"]) < 1e-9


def test_an_update_of_several_epochs_is_replayed_bit_for_bit(update):
    settings = {
        "minibatches": 2,
        "epochs": 2,
        "proximal": "trainer",
        "correction": CorrectionConfig(high=1.2),
        "aggregation": "sequence_mean",
        "entropy_coefficient": 0.01,
        "loss": FunctionConfig(fn="gspo"),
    }
    assert update(mismatch=0.5, **settings) == update(mismatch=0.5, **settings)


def test_a_correction_of_engines_that_agree_changes_no_bit(update):
    plain = update(proximal="trainer")
    corrected = update(proximal="trainer", correction=CorrectionConfig(method="mask", low=0.5, high=5.0))
    assert corrected[1] == plain[1]
    assert corrected[0].items() > plain[0].items()


def test_every_aggregation_trains_another_policy(update):
    aggregations = ({"aggregation": "token_mean"}, {"aggregation": "sequence_mean"}, {"aggregation": "fixed_horizon"})
    results = [update(**aggregation, max_tokens=16) for aggregation in aggregations]
    assert len({weights for _, weights in results}) == 3
    # On policy the loss is the weighted mean of -A.
    expected = (
        -sum(a * n for a, n in zip(ADVANTAGES, LENGTHS, strict=True)) / sum(LENGTHS),
        -sum(ADVANTAGES) / 8,
        -sum(a * n for a, n in zip(ADVANTAGES, LENGTHS, strict=True)) / (8 * 16),
    )
    assert [summary["loss/policy"] for summary, _ in results] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_horizon"])
def test_a_group_that_is_not_kept_does_not_dilute_the_loss(update, aggregation):
    settings = {"aggregation": aggregation, "max_tokens": 16}
    assert update(num_kept=4, **settings) == update(num_completions=4, **settings)


def test_an_update_without_a_kept_completion_leaves_the_policy_as_it_is(update, qwen3, exported, open_trainer, digest):
    summary, weights = update(num_kept=0)
    assert (summary["update/steps"], summary["tokens/trained"]) == (0, 0)
    assert weights == digest(exported(open_trainer(qwen3), qwen3))


def test_the_entropy_bonus_raises_the_entropy(update):
    plain, _ = update(epochs=4)
    rewarded, _ = update(epochs=4, entropy_coefficient=3.0)
    assert rewarded["entropy/mean"] > plain["entropy/mean"] + 0.01


@pytest.mark.parametrize("fn", ["reinforce", "grpo", "dapo", "cispo", "gspo", "sapo"])
def test_every_loss_trains(update, fn):
    summary, _ = update(loss=FunctionConfig(fn=fn), epochs=2)
    assert summary["grad_norm/total"] > 0
    assert summary["ratio/max"] > 1


@pytest.mark.parametrize("proximal", ["generator", "trainer"])
def test_a_generator_with_slightly_other_weights_raises_an_alarm(update, make_policy, proximal):
    @torch.no_grad()
    def disturb(model: torch.nn.Module) -> None:
        noise = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(1e-2 * torch.randn(parameter.shape, generator=noise))

    sound, _ = update(proximal=proximal)
    assert not find_alarms(sound, DEFAULT_ALARMS)
    disturbed, _ = update(proximal=proximal, policy=make_policy("qwen3-tied", disturb))
    assert "logprob_gap/mean" in find_alarms(disturbed, DEFAULT_ALARMS)
    assert ("kl/mismatch" in find_alarms(disturbed, DEFAULT_ALARMS)) == (proximal == "trainer")
    ratios = "ratio" if proximal == "generator" else "mismatch_ratio"
    assert disturbed[f"{ratios}/effective_sample_size"] < 0.99 < sound[f"{ratios}/effective_sample_size"]
