"""Overrides reach torchtitan, or say why not."""

from __future__ import annotations

import logging

import pytest

from forge_core.config import OptimizerConfig, TrainerConfig
from forge_core.trainer.torchtitan_config import compute_dtype, lr_scheduler_config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"compile.enabel": True}, r"compile.enabel, which torchtitan does not have; did you mean compile.enable"),
        ({"enable_cpu_offload": True}, r"did you mean training.enable_cpu_offload\?"),
        ({"nonsense.x": 1}, "settings start with"),
        ({"training.max_norm": 2.0}, "follows from ours; set optimizer.max_grad_norm instead"),
        ({"training.seq_len": 64}, "set trainer.row_tokens instead"),
        ({"lr_scheduler.warmup_steps": 3}, "set optimizer.warmup_steps instead"),
        ({"parallelism.data_parallel_shard_degree": 2}, "set trainer.num_ranks instead"),
        ({"parallelism.tensor_parallel_degree": 2}, "has no effect in this trainer"),
        ({"checkpoint.enable": True}, "has no effect in this trainer"),
        ({"compile.enable": "perhaps"}, "compile.enable to 'perhaps': .*boolean"),
        ({"parallelism.fsdp_reshard_after_forward": "sometimes"}, "Input should be 'default', 'always' or 'never'"),
    ],
)
def test_an_override_that_would_not_take_effect_is_refused(overrides, message, open_trainer, qwen3):
    with pytest.raises(ValueError, match=message):
        open_trainer(qwen3, overrides=overrides)


def test_overrides_reach_torchtitan_and_survive_an_optimizer_reset(open_trainer, qwen3):
    overrides = {
        "optimizer.implementation": "for-loop",
        "lr_scheduler.min_lr_factor": 0.1,
        "parallelism.fsdp_reshard_after_forward": "never",
    }
    trainer = open_trainer(qwen3, overrides=overrides)
    trainer.reset_optimizer(OptimizerConfig(schedule="linear"), 4)
    assert trainer.config.parallelism.fsdp_reshard_after_forward == "never"
    assert trainer.config.lr_scheduler.min_lr_factor == 0.1
    assert trainer.optimizers.optimizers[0].param_groups[0]["fused"] is False


def test_a_settings_error_leaves_the_process_ready_for_another_try(open_trainer, qwen3):
    with pytest.raises(ValueError, match=r"num_ranks is 2, but 1 processes run; .*torchrun --nproc-per-node 2"):
        open_trainer(qwen3, num_ranks=2)
    open_trainer(qwen3)


def test_a_warm_up_longer_than_a_decaying_run_is_refused():
    with pytest.raises(ValueError, match="warmup_steps is 5, more than the 4 steps"):
        lr_scheduler_config(OptimizerConfig(schedule="cosine", warmup_steps=5), 4)


def test_precision_follows_the_setting():
    assert compute_dtype(TrainerConfig(dtype="bfloat16")) == "bfloat16"
    assert compute_dtype(TrainerConfig(dtype="float32")) == "float32"


def test_opening_a_trainer_logs_nothing(open_trainer, qwen3, caplog):
    with caplog.at_level(logging.INFO):
        open_trainer(qwen3)
    assert [record.getMessage() for record in caplog.records] == []
