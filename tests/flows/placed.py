"""A run whose only stage is in another pool, as a deployment of its own, for tests of what becomes of the two."""

from __future__ import annotations

from prefect import flow
from prefect.logging import get_run_logger

from forge_core.config import PostTrainConfig
from forge_core.plan import Plan
from tasks import stages
from tasks.processes import stage_processes


@flow(name="placed", persist_result=False)
def placed(config: PostTrainConfig, run_id: str) -> str:
    """The digest of the dataset of this run's rollouts."""
    with stage_processes(config, get_run_logger()):
        return stages.dataset(Plan(config, run_id).dataset(config.grpo.dataset)).digest
