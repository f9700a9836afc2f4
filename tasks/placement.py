"""Stages in other work pools: Prefect carries a job there, and what comes back is the manifest in the store.

A stage that no worker of its pool takes in time, or whose flow run crashed, goes to the next pool of its list. A parent
that was lost finds its stage again, by the job.
"""

from __future__ import annotations

import time

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound

from forge_core.artifacts import Manifest
from forge_core.placement_config import PlacementConfig, choose, choose_after
from forge_core.stage_job import StageJob
from forge_core.stages.process import StageError
from forge_core.stages.workspace import committed
from tasks.stage_runs import POLL_SECONDS, Log, StageRuns, pool_of

# A child ends its stage at the limit, and may then take as long again for a snapshot that it has deferred. One that is
# still running after that has lost its machine.
LOST_AFTER_LIMITS = 2
LOST_AFTER_SECONDS = 300.0


class Placement:
    """The stages of one run in work pools, and how often one went to another pool than it was meant for."""

    def __init__(self, config: PlacementConfig, logger: Log) -> None:
        self._config, self._logger = config, logger
        self._passed_over: set[str] = set()  # pools that had their time and have not been ready since
        self.redirects = 0
        self.rows: list[dict[str, str | float]] = []  # one for each flow run, for people
        self.last: Manifest | None = None  # the newest that came back

    def pools(self, stage: str) -> tuple[str, ...]:
        """The pools of a stage, none when it runs where the flow does."""
        return self._config.pools.get(stage, ())

    def check(self) -> None:
        """Raise ValueError when a pool has no deployment for stages."""
        wanted = {pool: stage for stage, pools in self._config.pools.items() for pool in pools}
        if not wanted:
            return
        with get_client(sync_client=True) as client:
            for pool, stage in wanted.items():
                try:
                    client.read_deployment_by_name(f"stage/{pool}")
                except ObjectNotFound:
                    raise ValueError(
                        f"placement.pools.{stage} names {pool}, and the Prefect server has no deployment "
                        f"stage/{pool}; create it (`make stages POOLS={pool}`) or name another pool"
                    ) from None

    def run(self, job: StageJob, time_limit_seconds: float) -> Manifest:
        """The job's output, made by a flow run in one of its pools; one that is on its way already is adopted.

        Raises StageError as a stage process of this machine does. When this process is told to end, the flow run is
        cancelled; when it is killed, the flow run goes on and the next attempt finds it.
        """
        with get_client(sync_client=True) as client:
            runs = StageRuns(client, job, self._logger)
            child = self._adopt(runs, job) or self._submit(runs, job, time_limit_seconds)
            try:
                while not self._is_taken(runs, child):
                    child = self._redirect(runs, job, child, time_limit_seconds)
                child = _ended(runs, job, child, time_limit_seconds)
            except BaseException as error:
                if not isinstance(error, Exception):  # a signal, by which Prefect and people cancel a run
                    runs.cancel(child)
                raise
        self._note(child)
        self.last = _outcome(job, child)
        return self.last

    def _adopt(self, runs: StageRuns, job: StageJob) -> FlowRun | None:
        for child in runs.known():
            if child.state and not (child.state.is_final() or child.state.is_cancelling()):
                self._logger.info("%s: found again in pool %s, flow run %s", job.label, pool_of(child), child.id)
                return child
        return None

    def _submit(self, runs: StageRuns, job: StageJob, time_limit_seconds: float) -> FlowRun:
        """A new flow run, in the pool whose turn it is."""
        earlier, pools = runs.known(), self.pools(job.stage)
        states = runs.pool_states(pools)
        self._passed_over = {pool for pool in self._passed_over if states.get(pool) != "ready"}
        wanted, why = pools[0], f"it is {states[pools[0]]}"
        pool = choose(pools, states, self._passed_over)
        if earlier and earlier[0].state and earlier[0].state.is_crashed():
            wanted, why = pool_of(earlier[0]), "its flow run crashed"
            pool = choose_after(wanted, pools, states) or pool
        if pool != wanted:
            self._count_redirect(job, wanted, pool, why)
        return runs.create(pool, attempt=len(earlier), time_limit_seconds=time_limit_seconds)

    def _is_taken(self, runs: StageRuns, child: FlowRun) -> bool:
        """Whether a worker takes the flow run in time. How long that one needs to start it is another matter."""
        deadline = time.monotonic() + self._config.redirect_after_seconds
        while True:
            state = runs.read(child).state
            if state and state.type != StateType.SCHEDULED:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)

    def _redirect(self, runs: StageRuns, job: StageJob, child: FlowRun, time_limit_seconds: float) -> FlowRun:
        """The job's flow run in the next pool that is ready; the same one when none is, or when it has ended."""
        current, pools = pool_of(child), self.pools(job.stage)
        states = runs.pool_states({current, *pools})
        pool = choose_after(current, pools, states)
        why = f"not taken in {self._config.redirect_after_seconds:g} s (the pool is {states[current]})"
        if pool is None:
            self._logger.warning("%s in pool %s: %s; no other pool of its list is ready", job.label, current, why)
            return child
        self._passed_over.add(current)
        child = runs.cancel(child)
        if child.state and not (child.state.is_cancelled() or child.state.is_cancelling()):
            return child
        self._note(child)
        self._count_redirect(job, current, pool, why)
        return runs.create(pool, attempt=len(runs.known()), time_limit_seconds=time_limit_seconds)

    def _count_redirect(self, job: StageJob, pool: str, other: str, why: str) -> None:
        self.redirects += 1
        self._logger.warning("%s goes from pool %s to pool %s: %s", job.label, pool, other, why)

    def _note(self, child: FlowRun) -> None:
        self.rows.append(
            {
                "stage": child.name,
                "pool": pool_of(child),
                "ended as": child.state_name or "",
                "seconds waited": round(child.estimated_start_time_delta.total_seconds(), 1),
                "seconds run": round(child.total_run_time.total_seconds(), 1),
                "flow run": str(child.id),
            }
        )


def _ended(runs: StageRuns, job: StageJob, child: FlowRun, time_limit_seconds: float) -> FlowRun:
    """The flow run once it has come to an end, however that is. Raises StageError when it never does."""
    deadline = time.monotonic() + LOST_AFTER_LIMITS * time_limit_seconds + LOST_AFTER_SECONDS
    child = runs.read(child)
    while not (child.state and child.state.is_final()):
        if time.monotonic() > deadline:
            runs.cancel(child)
            raise StageError(job.stage, "timeout", f"flow run {child.id} in pool {pool_of(child)} does not end")
        time.sleep(POLL_SECONDS)
        child = runs.read(child)
    return child


def _outcome(job: StageJob, child: FlowRun) -> Manifest:
    """The manifest that a flow run has made; raises StageError with the cause that it names otherwise."""
    state, where = child.state, f"flow run {child.id} in pool {pool_of(child)}"
    assert state is not None
    if state.is_completed():
        if (manifest := committed(job)) is not None:
            return manifest
        raise StageError(
            job.stage,
            "NotShared",
            f"{where} has made {job.output}, which cannot be seen from here; root must be a store that both machines "
            "reach (s3://bucket/prefix)",
        )
    if state.is_crashed():
        raise StageError(job.stage, "died", f"{where} crashed: {state.message}")
    if state.is_cancelled():
        raise StageError(job.stage, "Cancelled", f"{where} was cancelled; retry this run to go on")
    raise StageError(job.stage, state.name or "Failed", f"{where}: {state.message}")
