"""DPO: the gradient of its two passes is that of its loss, and a run moves the margins apart."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from forge_core import storage
from forge_core.batching import TrainSequence
from forge_core.config import DpoRunConfig, FreshPolicyConfig, PolicyConfig
from forge_core.data_config import DatasetConfig
from forge_core.examples import Example, Message, write_examples
from forge_core.fit_config import DpoConfig, ValidationConfig
from forge_core.jobs import DpoJob
from forge_core.plan import Plan
from forge_core.stages import dataset, dpo, start
from forge_core.stages.workspace import Workspace
from forge_core.trainer_config import OptimizerConfig, TrainerConfig

SHAPE = FreshPolicyConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32)
SUMS = DatasetConfig(fn="arithmetic", kwargs={"max_number": 4, "pairs": True})


@pytest.fixture
def prepared(tmp_path: Path):
    """A DPO job with its inputs committed, and a workspace whose trainer is closed in the end."""
    torch.set_num_threads(1)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    workspace = Workspace(scratch)

    def prepare(run_id: str = "run", row_tokens: int = 48, **settings) -> tuple[DpoJob, Workspace]:
        config = DpoRunConfig(
            root=str(tmp_path / "store"),
            policy=PolicyConfig(fresh=SHAPE),
            trainer=TrainerConfig(row_tokens=row_tokens),
            dpo=DpoConfig(
                **{"dataset": SUMS, "optimizer": OptimizerConfig(learning_rate=5e-3), "beta": 0.5} | settings
            ),
        )
        plan = Plan(config, run_id)

        def commit(stage, job):
            workspace.begin_job(job)
            return stage.run(job, workspace).ref

        validation = config.dpo.validation
        heldout = commit(dataset, plan.dataset(validation.dataset)) if validation else None
        return plan.dpo(commit(start, plan.start()), commit(dataset, plan.dataset(SUMS)), heldout), workspace

    yield prepare
    if "learner" in workspace.held:
        workspace.held["learner"].trainer.close()


def run(job: DpoJob, workspace: Workspace):
    workspace.begin_job(job)
    manifest = dpo.run(job, workspace)
    workspace.finish_job()
    assert manifest is not None
    return manifest


def test_margins_start_at_zero_and_move_apart(prepared):
    validation = ValidationConfig(dataset=SUMS, num_examples=10, every=10)
    manifest = run(*prepared(num_epochs=8, batch_size=8, validation=validation))
    lines = storage.read_bytes(f"{manifest.files_uri}/history.jsonl").splitlines()
    steps = [step for step in map(json.loads, lines) if "dpo/margin" in step]
    # Against itself the policy has no margin: the loss begins at log 2.
    assert steps[0]["loss/policy"] == pytest.approx(math.log(2), abs=1e-6)
    assert manifest.summary["dpo/first_validation_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert manifest.summary["dpo/validation_loss"] < 0.6
    assert manifest.summary["dpo/margin"] > 0.2
    assert manifest.summary["dpo/validation_margin"] > 0.2


def test_gradient_of_the_two_passes_is_that_of_the_loss(prepared):
    job, workspace = prepared(beta=0.3, label_smoothing=0.1)
    _, policy_dir = workspace.fetch(job.policy)
    _, examples_dir = workspace.fetch(job.dataset)
    pairs = dpo.read_pairs(examples_dir / "examples.jsonl", policy_dir, job)[:6]
    trainer = dpo.learner.trainer_from_policy(job, job.policy, job.dpo.optimizer, 8, workspace)
    generator = torch.Generator().manual_seed(0)
    pairs = [dpo.Pair(p.chosen, p.rejected, float(torch.randn((), generator=generator))) for p in pairs]

    batch = dpo.pack(pairs, job)
    assert batch.num_rows > 1  # the answers of a pair need not share a row
    loss, slopes, _ = dpo.compare(dpo.answer_logprobs(trainer, batch), pairs, job)

    # The loss written down as in the paper, through the trainer's own forward pass.
    trainer.optimizers.zero_grad()
    logprobs, _ = trainer._query_tokens(batch.to(trainer.device), 1.0)
    sums = torch.zeros(len(pairs) * 2).index_add(0, batch.sequence_ids[batch.mask], logprobs)
    reference = torch.tensor([pair.reference_margin for pair in pairs])
    margins = 0.3 * (sums[0::2] - sums[1::2] - reference)
    direct = (-0.9 * F.logsigmoid(margins) - 0.1 * F.logsigmoid(-margins)).mean()
    direct.backward()
    expected = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    assert loss == pytest.approx(direct.item(), abs=1e-5)

    trainer.optimizers.zero_grad()
    with_slopes = dpo.with_slopes(batch, slopes)
    logprobs, _ = trainer._query_tokens(with_slopes.to(trainer.device), 1.0)
    (-with_slopes.advantages[batch.mask] * logprobs * with_slopes.weights[batch.mask]).sum().backward()
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-6, rtol=1e-4)


def test_pair_with_an_answer_that_does_not_fit_is_left_out_and_counted(prepared, tmp_path):
    # "0+0=" is 7 tokens with its marks; the rows have room for a short answer and not for a long one.
    turns = (Message(role="user", content="0+0="), Message(role="assistant", content="0"))
    rejected = {"short": "1", "long": "1" * 40}
    examples = [Example(id=name, messages=turns, metadata={"rejected": text}) for name, text in rejected.items()]
    job, workspace = prepared(row_tokens=32)
    path = tmp_path / "examples.jsonl"
    write_examples(examples, path)
    pairs = dpo.read_pairs(path, workspace.fetch(job.policy)[1], job)
    assert [dpo.is_short(pair, job) for pair in pairs] == [True, False]


def test_example_without_a_rejected_answer_is_refused(prepared, tmp_path):
    job, workspace = prepared()
    turns = (Message(role="user", content="0+0="), Message(role="assistant", content="0"))
    write_examples([Example(id="bare", messages=turns)], tmp_path / "examples.jsonl")
    with pytest.raises(ValueError, match=r"example bare has no text in metadata\.rejected"):
        dpo.read_pairs(tmp_path / "examples.jsonl", workspace.fetch(job.policy)[1], job)


def test_of_several_turns_the_last_one_is_compared():
    mask = torch.tensor([False, True, True, False, False, True, True, False])
    sequence = TrainSequence(torch.arange(8), mask, torch.zeros(8))
    assert dpo.only_last_turn(sequence).loss_mask.nonzero().flatten().tolist() == [5, 6]
