"""Dynamic sampling, the reference policy and alarms in whole runs."""

from __future__ import annotations

import itertools
import logging

import mlflow
import pytest

from deployments.local_service import Service
from flows.post_train import post_train
from flows.sampling import NothingToLearnError
from forge_core import storage
from forge_core.alarms import AlarmError, BoundsConfig
from forge_core.artifacts import Manifest, read_manifest
from forge_core.config import DynamicSamplingConfig, PostTrainConfig, RewardConfig
from forge_core.plan import Plan
from forge_core.update_config import KlConfig
from tests.pipeline import policies, tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PARITY = (RewardConfig(fn="tests.flows.functions:parity"),)


def changed(config: PostTrainConfig, **grpo) -> PostTrainConfig:
    return config.model_copy(update={"grpo": config.grpo.model_copy(update=grpo)})


@pytest.fixture(scope="module")
def refilled(
    prefect_server: Service, mlflow_server: Service, tmp_path_factory: pytest.TempPathFactory
) -> PostTrainConfig:
    """The config of a finished run called `refilled`, whose reward leaves some groups without a spread."""
    config = changed(
        tiny_config(str(tmp_path_factory.mktemp("store"))),
        num_iterations=2,
        rewards=PARITY,
        dynamic_sampling=DynamicSamplingConfig(),
        kl=KlConfig(coefficient=0.05),
    )
    post_train(config, run_id="refilled")
    return config


def stored(config: PostTrainConfig, run_id: str, folder: str) -> dict[str, Manifest]:
    """The committed artifacts in a folder of a run, by name."""
    run_uri = Plan(config, run_id).run_uri
    found = {name: read_manifest(f"{run_uri}/{folder}/{name}") for name in storage.list_names(f"{run_uri}/{folder}")}
    return {name: manifest for name, manifest in found.items() if manifest is not None}


def test_prompts_are_sampled_until_there_are_enough_groups_to_learn_from(refilled: PostTrainConfig):
    scored, updates = stored(refilled, "refilled", "scored"), policies(Plan(refilled, "refilled"))[2:]
    assert len(scored) > 2, "this reward needs refills"
    by_iteration = [
        [manifest for name, manifest in scored.items() if name.startswith(version)] for version in ("v0001", "v0002")
    ]
    for sets, update in zip(by_iteration, updates, strict=True):
        informative = list(itertools.accumulate(int(one.summary["groups/informative"]) for one in sets))
        assert [count >= 8 for count in informative] == [*[False] * (len(sets) - 1), True]
        assert update.summary["groups/surplus"] == informative[-1] - 8
        assert update.summary["rollout/generation_batches"] == len(sets)
        assert [ref.digest for name, ref in update.inputs.items() if name.startswith("scored")] == [
            one.digest for one in sets
        ]

    rollouts = stored(refilled, "refilled", "rollouts").values()
    assert [manifest.job["first_prompt"] for manifest in rollouts] == [8 * place for place in range(len(scored))]
    assert stored(refilled, "refilled", "reference_logprobs").keys() == scored.keys()
    reference = Plan(refilled, "refilled").run_uri + "/policies/v0001"
    for manifest in stored(refilled, "refilled", "reference_logprobs").values():
        assert manifest.inputs["policy"].uri == reference


def test_a_run_that_sampled_more_is_resumed_without_sampling_again(refilled: PostTrainConfig):
    before = {folder: stored(refilled, "refilled", folder) for folder in ("rollouts", "scored", "policies")}
    post_train(refilled, run_id="refilled")
    assert {folder: stored(refilled, "refilled", folder) for folder in before} == before


def test_rewards_without_a_spread_end_the_run_after_the_last_batch_and_name_the_mean(refilled: PostTrainConfig):
    for value, advice in ((1.0, "too easy"), (0.0, "too hard")):
        config = changed(
            refilled.model_copy(update={"reuse_from": Plan(refilled, "refilled").run_uri}),
            rewards=(RewardConfig(fn="tests.flows.functions:constant", kwargs={"value": value}),),
            dynamic_sampling=DynamicSamplingConfig(max_generation_batches=2),
        )
        message = (
            rf"iteration 0: 2 generation batches of 8 prompts gave 0 groups .* is {value:.3f}: the data are {advice}"
        )
        with pytest.raises(NothingToLearnError, match=message):
            post_train(config, run_id=f"constant-{value:.0f}")
        assert stored(config, f"constant-{value:.0f}", "scored").keys() == {"v0001", "v0001-01"}


def test_an_alarm_is_logged_counted_and_stops_the_run_where_asked(refilled: PostTrainConfig, caplog):
    config = refilled.model_copy(update={"reuse_from": Plan(refilled, "refilled").run_uri, "name": "alarmed"})
    high = BoundsConfig(low=100.0, stop=True)
    with pytest.raises(AlarmError, match=r"^entropy/mean is .* outside of \[100, inf\]"):
        post_train(changed(config, alarms={"entropy/mean": high}), run_id="alarmed")
    assert len(policies(Plan(config, "alarmed"))) == 3  # the update that raised it is there

    caplog.clear()
    with caplog.at_level(logging.WARNING):
        post_train(changed(config, alarms={"entropy/mean": BoundsConfig(low=100.0)}), run_id="alarmed")
    assert len([line for line in caplog.messages if line.startswith("ALARM in iteration")]) == 2
    assert "MLflow" not in caplog.text  # a changed setting is no reason to refuse the run's parameters
    experiment = mlflow.get_experiment_by_name("forge/alarmed")
    assert experiment is not None
    [parent] = mlflow.MlflowClient().search_runs([experiment.experiment_id], "attributes.run_name = 'alarmed'")
    points = mlflow.MlflowClient().get_metric_history(parent.info.run_id, "alarms/raised")
    assert sorted((point.step, point.value) for point in points) == [(0, 1.0), (1, 1.0)]
