"""Settings that cannot work are refused while the config is loaded, with field, value and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core.config import (
    DpoRunConfig,
    EvalConfig,
    GrpoRunConfig,
    PostTrainConfig,
    RewardModelRunConfig,
    RunConfig,
    SftRunConfig,
    load_config,
)
from forge_core.drill import DrillConfig
from forge_core.plan import Plan
from forge_core.quantize_run import QuantizeRunConfig
from forge_core.serve_config import ServeConfig

CONFIGS = Path(__file__).parent.parent.parent / "deployments" / "configs"


def refuse(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PostTrainConfig.model_validate(changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sead": 1}, r"sead\s+Extra inputs are not permitted"),
        ({"grpo": {"grop_size": 8}}, r"grpo.grop_size\s+Extra inputs"),
        ({"grpo": {"group_size": 1}}, "group_size is 1; .* use at least 2"),
        ({"grpo": {"sampling": {"top_p": 0.9}}}, "top_p is 0.9 .* need top_p=1"),
        ({"grpo": {"sampling": {"top_k": 5}}}, "top_k is 5; .*top_k=0"),
        ({"grpo": {"sampling": {"temperature": 0}}}, "temperature is 0; .* use 1.0"),
        ({"grpo": {"prompts_per_iteration": 2, "minibatches": 4}}, "minibatches is 4, more than prompts_per_iteration"),
        ({"grpo": {"correction": {}}}, "correction is set and proximal is 'generator'; .* set proximal to 'trainer'"),
        (
            {"grpo": {"proximal": "trainer", "correction": {"low": 2, "high": 2}}},
            "low is 2.0 and high is 2.0; low must",
        ),
        ({"grpo": {"aggregation": "mean"}}, r"grpo.aggregation\s+Input should be 'token_mean', 'sequence_mean' or"),
        ({"grpo": {"epochs": 0}}, r"grpo.epochs\s+Input should be greater than or equal to 1"),
        ({"grpo": {"entropy_coefficient": -0.1}}, r"grpo.entropy_coefficient\s+Input should be greater than or"),
        (
            {"grpo": {"kl": {"coefficient": 0.1, "estimator": "k1"}}},
            "k1, which has no expected gradient in a loss",
        ),
        (
            {"grpo": {"kl": {"coefficient": 0.1, "place": "reward", "estimator": "k3_ratio"}}},
            "k3_ratio, but rewards belong to the policy that sampled; use k1",
        ),
        ({"grpo": {"dynamic_sampling": {}, "drop_uniform": False}}, "dynamic_sampling replaces groups .* set one of"),
        ({"grpo": {"alarms": {"entropy/mean": {}}}}, "low and high are both unset; set one of them"),
        ({"grpo": {"alarms": {"entropy/mean": {"low": 2, "high": 1}}}}, "low is 2.0 and high is 1.0; low must not"),
        ({"grpo": {"overlong": {"buffer_tokens": 32}}}, r"overlong.buffer_tokens is 32, more than .* \(16\)"),
        ({"trainer": {"dtype": "float16"}}, r"trainer.dtype\s+Input should be 'auto', 'float32' or 'bfloat16'"),
        ({"grpo": {"rewards": [{"fn": "exact_number", "timeout_seconds": 0}]}}, r"timeout_seconds\s+.* greater than 0"),
        ({"evals": [{"name": "a"}, {"name": "b"}, {"name": "a"}]}, r"two evaluations are named a; give each its own"),
        ({"evals": [{"reward_timeout_seconds": -1}]}, r"reward_timeout_seconds\s+Input should be greater than 0"),
        (
            {"grpo": {"rewards": [{"fn": "exact_number", "gate": "boxed"}]}},
            r"gate boxed, which must be .* none",
        ),
        ({"grpo": {"rewards": []}}, r"grpo.rewards\s+Tuple should have at least 1 item"),
        ({"name": "My Policy"}, r"name\s+String should match pattern"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(changes, message):
    refuse(changes, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grpo": {"rewards": [{"fn": "exact_numbr"}]}}, "reward is 'exact_numbr'"),
        ({"grpo": {"loss": {"fn": "grpo", "kwargs": {"clip": 1}}}}, "loss grpo has no setting 'clip'; it has clip_low"),
        ({"grpo": {"advantage": {"fn": "zscore"}}}, "advantage is 'zscore', not a built-in .group_zscore"),
        ({"trainer": {"row_tokens": 512}}, r"row_tokens is 512, less than .* \(1024\).* raise row_tokens or lower"),
        ({"sft": {"dataset": {"fn": "file"}}}, "dataset file needs kwargs path"),
        (
            {"grpo": {"dynamic_sampling": {}, "advantage": {"fn": "batch_std"}}},
            "advantage batch_std compares a whole batch, which would then be several; use .* group_zscore",
        ),
        ({"policy": {"uri": "/no/such/place"}}, "policy.uri"),
        ({"root": "nosuchprotocol://x"}, "root is nosuchprotocol://x, which cannot be written"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_before_any_process_starts(tmp_path: Path, changes, message):
    config = PostTrainConfig.model_validate({"root": str(tmp_path)} | changes)
    with pytest.raises(ValueError, match=message):
        Plan(config, "run").check()


def test_a_misspelt_field_in_a_file_names_the_file(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("seed: one\n")
    with pytest.raises(ValueError, match=r"mine.yaml: .*\n?seed"):
        load_config(tmp_path / "mine.yaml", PostTrainConfig)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_opens_with_its_command(path: Path):
    models = {
        "sft": SftRunConfig,
        "dpo": DpoRunConfig,
        "reward_model": RewardModelRunConfig,
        "grpo": GrpoRunConfig,
        "evaluate": RunConfig,
        "quantize": QuantizeRunConfig,
        "drill": DrillConfig,
        "soak": DrillConfig,
        "serve": ServeConfig,
    }
    load_config(path, models.get(path.stem, PostTrainConfig))
    assert path.read_text().startswith(("# python -m ", "# prefect deployment run ", "# make "))


ALGORITHMS = CONFIGS / "algorithms"


@pytest.mark.parametrize("path", sorted(ALGORITHMS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_algorithm_has_a_recipe_that_can_be_planned_and_opens_with_its_command(path: Path, tmp_path: Path):
    config = load_config(path, PostTrainConfig).model_copy(update={"root": str(tmp_path)})
    Plan(config, "run").check()
    assert config.name == path.stem.replace("_", "-")
    assert path.read_text().startswith(f"# python -m flows.post_train deployments/configs/algorithms/{path.name}\n")


def test_there_is_a_recipe_for_each_algorithm():
    recipes = {path.stem for path in ALGORITHMS.glob("*.yaml")}
    assert recipes >= {"grpo", "dr_grpo", "dapo", "cispo", "gspo", "sapo", "rloo", "reinforce_pp", "simple_grpo"}


def test_settings_cannot_be_changed_after_they_were_checked():
    with pytest.raises(ValueError, match="frozen"):
        EvalConfig().num_examples = 3  # type: ignore[misc]


def test_equal_configs_give_equal_jobs_wherever_their_artifacts_lie(tmp_path: Path):
    config = load_config(CONFIGS / "tiny.yaml", PostTrainConfig)
    jobs = [Plan(config.model_copy(update={"root": f"{tmp_path}/{name}"}), name).start() for name in "ab"]
    assert jobs[0].output != jobs[1].output
    assert jobs[0].digest() == jobs[1].digest()
