"""Flow `reward-model`: a policy turned into a reward model by preference pairs; the reward `reward_model` loads it."""

from __future__ import annotations

from prefect import flow

from flows.training_data import training_data
from forge_core.config import RewardModelRunConfig
from forge_core.side_jobs import reward_model_job
from tasks import stages
from tasks.run import open_run


@flow(name="reward-model", flow_run_name="{config.name}-seed{config.seed}", persist_result=False)
def reward_model(config: RewardModelRunConfig, run_id: str | None = None) -> dict[str, float | int]:
    """Train a reward model; its URI is logged, and is what `weights` of the reward `reward_model` takes."""
    with open_run(config, run_id) as run:
        policy = stages.start(run.plan.start())
        settings = config.reward_model
        pairs = training_data(run, settings.dataset, step=0)
        validation = settings.validation
        heldout = stages.dataset(run.plan.dataset(validation.dataset)) if validation is not None else None
        trained = stages.reward_model(reward_model_job(run.plan, policy, pairs, heldout))
        summary = run.tracker.record(trained, step=1).summary
        run.logger.info("reward model %s: accuracy %.3f", trained.uri, summary["reward_model/accuracy"])
        return summary
