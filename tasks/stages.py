"""The stages as Prefect tasks: each finds its committed output or has a stage process make it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import TypeVar

from prefect import runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger
from prefect.tasks import Task

from forge_core import publication, retention
from forge_core.artifacts import ArtifactError, Ref
from forge_core.gates import GateResult
from forge_core.jobs import (
    DatasetJob,
    DpoJob,
    EvaluateJob,
    OverlapJob,
    QatJob,
    QuantizeJob,
    ReferenceJob,
    RewardModelJob,
    RolloutJob,
    ScoreJob,
    SftJob,
    SpeedJob,
    StageJob,
    StartJob,
    UpdateJob,
)
from forge_core.operation import RetentionConfig
from forge_core.stages.workspace import committed
from tasks.failures import RETRIES, failure_class
from tasks.processes import run_in_stage_process

AnyJob = TypeVar("AnyJob", bound=StageJob)

# As many as the class with the most: StageProcesses counts by class and raises StageStoppedError when one is used up.
MAX_RETRIES = sum(RETRIES.values())


def may_be_cured(_task: Task, _run: TaskRun, state: State) -> bool:
    """Whether a failed stage is given another attempt."""
    try:
        state.result()
    except Exception as error:
        return failure_class(error) != "permanent"
    return False


def by_job(_context: TaskRunContext, parameters: dict) -> str:
    """Cache key of a stage task: where its output goes and the digest of all that decides it."""
    job: StageJob = parameters["job"]
    return hashlib.sha256(f"{job.output} {job.digest()}".encode()).hexdigest()


def stage_task(body: Callable[[AnyJob], Ref]) -> Callable[[AnyJob], Ref]:
    """A Prefect task that runs a job unless its output is committed; the UI shows what was there already as Cached.

    Prefect's record of a result may outlive the artifact, so it counts only while the manifest exists.
    """
    stage = Task(
        fn=body,
        task_run_name=_label,
        persist_result=True,
        result_serializer="json",
        cache_key_fn=by_job,
        retries=MAX_RETRIES,
        retry_delay_seconds=[1, 2, 4, 8, 16, 32, 60],
        retry_jitter_factor=0.5,
        retry_condition_fn=may_be_cured,
    )

    @functools.wraps(body)
    def call(job: AnyJob) -> Ref:
        return stage.with_options(refresh_cache=committed(job) is None)(job)

    return call


def _label() -> str:
    return runtime.task_run.parameters["job"].label


@stage_task
def dataset(job: DatasetJob) -> Ref:
    """Materialise a dataset."""
    return _run(job)


@stage_task
def overlap(job: OverlapJob) -> Ref:
    """Find the problems of evaluations in a training set."""
    return _run(job)


@stage_task
def start(job: StartJob) -> Ref:
    """Build or import the starting policy."""
    return _run(job)


@stage_task
def sft(job: SftJob) -> Ref:
    """Fine-tune a policy on chat examples."""
    return _run(job)


@stage_task
def dpo(job: DpoJob) -> Ref:
    """Train a policy on preference pairs."""
    return _run(job)


@stage_task
def reward_model(job: RewardModelJob) -> Ref:
    """Train a reward model on preference pairs."""
    return _run(job)


@stage_task
def rollout(job: RolloutJob) -> Ref:
    """Sample groups of completions."""
    return _run(job)


@stage_task
def reference(job: ReferenceJob) -> Ref:
    """Log-probs of completions under the reference policy."""
    return _run(job)


@stage_task
def score(job: ScoreJob) -> Ref:
    """Reward completions and compare them within their groups."""
    return _run(job)


@stage_task
def update(job: UpdateJob) -> Ref:
    """Make the next policy version from scored rollouts."""
    return _run(job)


@stage_task
def evaluate(job: EvaluateJob) -> Ref:
    """Measure a policy on held-out problems."""
    return _run(job)


@stage_task
def quantize(job: QuantizeJob) -> Ref:
    """Quantize a policy."""
    return _run(job)


@stage_task
def qat(job: QatJob) -> Ref:
    """Fine-tune a policy while it computes with quantized numbers."""
    return _run(job)


@stage_task
def speed(job: SpeedJob) -> Ref:
    """Compare the speed of a policy and of its quantized form."""
    return _run(job)


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=2)
def publish(
    root: str,
    name: str,
    policy: Ref,
    run_id: str,
    metrics: dict[str, float | int],
    gates: tuple[GateResult, ...] = (),
    replaces: int | None = None,
) -> publication.Publication | None:
    """Point the published name at a policy version; None when it was compared with another champion than there is."""
    try:
        return publication.publish(root, name, policy, run_id=run_id, metrics=metrics, gates=gates, replaces=replaces)
    except publication.ChampionChangedError as error:
        get_run_logger().warning("%s", error)
        return None


@task(cache_policy=NO_CACHE, task_run_name="prune")
def prune(run_uri: str, settings: RetentionConfig) -> None:
    """Delete the files of policies and train states that the settings do not keep; its failure costs only space."""
    try:
        retention.prune(run_uri, settings)
    except (ArtifactError, OSError) as error:
        get_run_logger().warning("nothing was pruned: %s", error)


def _run(job: StageJob) -> Ref:
    manifest = committed(job) or run_in_stage_process(job)
    return manifest.ref
