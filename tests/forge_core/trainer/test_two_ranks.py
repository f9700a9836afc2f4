"""Two gloo processes train as one does. One launch serves all tests: importing torchtitan is the expensive part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forge_core.batching import pack_sequences
from forge_core.config import OptimizerConfig, TrainerConfig
from forge_core.losses import grpo
from forge_core.trainer.policy_trainer import PolicyTrainer
from forge_core.trainer_config import LoraConfig
from tests.forge_core.trainer.two_ranks import gspo_step, lora_steps

REPOSITORY = Path(__file__).parents[3]
TRAINER = {"row_tokens": 32, "micro_batch_rows": 2}
OPTIMIZER = {"learning_rate": 1e-2, "schedule": "linear", "warmup_steps": 1, "weight_decay": 0.1}
TOTAL_STEPS = 6


@dataclass(frozen=True)
class Runs:
    """The same four steps on one rank, in this process, and on two ranks; metrics by step."""

    directory: Path
    one: list[dict[str, float]]
    two: dict[int, dict]  # rank -> results
    logprobs: torch.Tensor
    gspo: dict[str, float]
    lora: list[dict[str, float]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, policy_dirs, make_sequences) -> Runs:
    """Results of both."""
    out = tmp_path_factory.mktemp("two_ranks")
    policy, sequences = policy_dirs["qwen3-tied"], make_sequences()
    batch = pack_sequences(sequences, TRAINER["row_tokens"])
    trainer = PolicyTrainer.open(
        policy,
        trainer=TrainerConfig(**TRAINER),
        optimizer=OptimizerConfig(**OPTIMIZER),
        total_steps=TOTAL_STEPS,
        seed=0,
        scratch=out / "scratch",
    )
    try:
        logprobs = trainer.logprobs(batch)
        metrics = [trainer.train_step(batch, grpo) for _ in range(2)]
        trainer.save_train_state(out / "one_rank_state")
        metrics += [trainer.train_step(batch, grpo) for _ in range(2)]
        of_gspo = gspo_step(trainer, sequences, TRAINER["row_tokens"])
    finally:
        trainer.close()
    trainer = PolicyTrainer.open(
        policy,
        trainer=TrainerConfig(**TRAINER, lora=LoraConfig(rank=3)),
        optimizer=OptimizerConfig(**OPTIMIZER),
        total_steps=TOTAL_STEPS,
        seed=0,
        scratch=out / "scratch",
    )
    try:
        of_lora = lora_steps(trainer, batch, out / "lora_one", policy)
    finally:
        trainer.close()
    return Runs(out, metrics, _launch(out, policy, sequences), logprobs, of_gspo, of_lora)


def _launch(out: Path, policy: Path, sequences) -> dict[int, dict]:
    scenario = {
        "policy": str(policy),
        "trainer": TRAINER,
        "optimizer": OPTIMIZER,
        "total_steps": TOTAL_STEPS,
        "one_rank_state": str(out / "one_rank_state"),
        "sequences": [
            (s.token_ids.tolist(), s.loss_mask.tolist(), s.generator_logprobs.tolist(), s.advantage) for s in sequences
        ],
    }
    (out / "scenario.json").write_text(json.dumps(scenario))
    script = Path(__file__).with_name("two_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    launch = subprocess.Popen(
        [*command, str(out / "scenario.json")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = launch.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        launch.terminate()  # unlike kill, torchrun passes it on to the ranks
        pytest.fail(f"two ranks hang: {launch.communicate(timeout=60)[0][-4000:]}")
    assert launch.returncode == 0, output[-4000:]
    return {rank: json.loads((out / f"rank-{rank}.json").read_text()) for rank in (0, 1)}


def test_ranks_hold_unequal_numbers_of_trained_tokens(sequences):
    """The premise of the tests below: averages per rank would differ from the average over all tokens."""
    batch = pack_sequences(sequences, TRAINER["row_tokens"])
    counts = [int(batch.for_rank(rank, 2).mask.sum()) for rank in (0, 1)]
    assert sum(counts) == int(batch.mask.sum())
    assert counts[0] > 1.1 * counts[1]


def test_two_ranks_have_the_metrics_of_one(runs):
    for one, two in zip(runs.one, runs.two[0]["metrics"], strict=True):
        assert two == pytest.approx(one, abs=1e-5, rel=1e-4)


def test_two_ranks_agree_with_one_on_sequence_ratios_corrections_and_entropy(runs):
    assert runs.gspo["sequence_ratio/max"] > 1
    assert runs.two[0]["gspo"] == pytest.approx(runs.gspo, abs=1e-5, rel=1e-3)


def test_both_ranks_report_the_same(runs):
    assert runs.two[0] == runs.two[1]


def test_first_step_differs_by_rounding_alone(runs):
    assert runs.two[0]["metrics"][0] == pytest.approx(runs.one[0], abs=1e-6, rel=1e-6)


def test_each_rank_gets_the_logprobs_of_the_whole_batch(runs):
    for rank in (0, 1):
        gathered = load_file(runs.directory / f"logprobs-{rank}.safetensors")["logprobs"]
        torch.testing.assert_close(gathered, runs.logprobs, atol=1e-5, rtol=0)


def test_an_error_on_one_rank_stops_both_before_the_step(runs):
    assert "loss is nan" in runs.two[0]["error"]
    assert runs.two[0]["metrics"][0]["learning_rate"] == runs.one[0]["learning_rate"]


def test_two_ranks_continue_the_train_state_of_one(runs):
    for one, resumed in zip(runs.one[2:], runs.two[0]["resumed"], strict=True):
        assert resumed == pytest.approx(one, abs=1e-5, rel=1e-4)


def test_one_rank_continues_the_train_state_of_two(runs, open_trainer, qwen3, sequences):
    trainer = open_trainer(qwen3, optimizer=OptimizerConfig(**OPTIMIZER), total_steps=TOTAL_STEPS, **TRAINER)
    trainer.load_train_state(runs.directory / "two_rank_state")
    batch = pack_sequences(sequences, TRAINER["row_tokens"])
    for expected in runs.two[0]["metrics"][2:]:
        assert trainer.train_step(batch, grpo) == pytest.approx(expected, abs=1e-5, rel=1e-4)


def test_two_ranks_export_one_whole_policy(runs, open_trainer, sequences):
    out = runs.directory / "export"
    assert sorted(path.name for path in out.iterdir() if path.suffix == ".safetensors" or path.is_dir()) == [
        "model.safetensors"
    ]
    trainer = open_trainer(out)
    batch = pack_sequences(sequences, TRAINER["row_tokens"])
    final_loss = trainer.train_step(batch, grpo)["loss/policy"]
    assert final_loss < runs.one[-1]["loss/policy"]


def test_adapters_on_two_ranks_train_and_are_published_as_on_one(runs):
    for rank in (0, 1):
        for one, two in zip(runs.lora, runs.two[rank]["lora"], strict=True):
            assert two == pytest.approx(one, rel=1e-4, abs=1e-5)
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        one, two = load_file(runs.directory / "lora_one" / name), load_file(runs.directory / "lora" / name)
        assert one.keys() == two.keys()
        for tensor in one:
            torch.testing.assert_close(two[tensor], one[tensor], atol=1e-4, rtol=1e-4)
