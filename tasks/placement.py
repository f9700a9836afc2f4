"""Stages in other work pools: Prefect carries a job there, and what comes back is the manifest in the store.

A stage that no worker of its pool takes in time, or whose flow run crashed, goes to the next pool of its list. A parent
that was lost finds its stage again, by the job.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

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
        self.redirect_after_seconds, self.logger = config.redirect_after_seconds, logger
        self._pools = config.pools
        self._passed_over: set[str] = set()  # pools that had their time and have not been ready since
        self.redirects = 0
        self.rows: list[dict[str, str | float]] = []  # one for each flow run, for people
        self.last: Manifest | None = None  # the newest that came back

    def pools(self, stage: str) -> tuple[str, ...]:
        """The pools of a stage, none when it runs where the flow does."""
        return self._pools.get(stage, ())

    def check(self) -> None:
        """Raise ValueError when a pool has no deployment for stages."""
        wanted = {pool: stage for stage, pools in self._pools.items() for pool in pools}
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

    def run(self, jobs: Sequence[StageJob], time_limit_seconds: float) -> list[Manifest | StageError]:
        """What became of each job, all of them in their pools at once; one that is on its way already is adopted.

        When this process is told to end, the flow runs are cancelled; when it is killed, they go on, and the next
        attempt finds them.
        """
        placed: list[_PlacedJob] = []
        with get_client(sync_client=True) as client:
            try:
                for job in jobs:
                    placed.append(_PlacedJob(self, StageRuns(client, job, self.logger), job, time_limit_seconds))
                while [one for one in placed if not one.poll()]:  # every one of them, each time
                    time.sleep(POLL_SECONDS)
            except BaseException as error:
                if not isinstance(error, Exception):  # a signal, by which Prefect and people cancel a run
                    for one in placed:
                        one.cancel()
                raise
        outcomes = [one.outcome for one in placed if one.outcome is not None]
        self.last = next((made for made in reversed(outcomes) if isinstance(made, Manifest)), self.last)
        return outcomes

    def pool_for(self, runs: StageRuns, job: StageJob, earlier: Sequence[FlowRun]) -> str:
        """The pool for a new flow run of a job, after those that there have been, the newest first."""
        pools = self.pools(job.stage)
        states = runs.pool_states(pools)
        self._passed_over = {pool for pool in self._passed_over if states.get(pool) != "ready"}
        wanted, why = pools[0], f"it is {states[pools[0]]}"
        pool = choose(pools, states, self._passed_over)
        if earlier and earlier[0].state and earlier[0].state.is_crashed():
            wanted, why = pool_of(earlier[0]), "its flow run crashed"
            pool = choose_after(wanted, pools, states) or pool
        if pool != wanted:
            self.count_redirect(job, wanted, pool, why)
        return pool

    def pool_instead(self, runs: StageRuns, job: StageJob, current: str) -> str | None:
        """The pool for a job that nobody has taken in this one; None when it has to wait on."""
        pools = self.pools(job.stage)
        states = runs.pool_states({current, *pools})
        pool = choose_after(current, pools, states)
        why = f"not taken in {self.redirect_after_seconds:g} s (the pool is {states[current]})"
        if pool is None:
            self.logger.warning("%s in pool %s: %s; no other pool of its list is ready", job.label, current, why)
        else:
            self._passed_over.add(current)
            self.count_redirect(job, current, pool, why)
        return pool

    def count_redirect(self, job: StageJob, pool: str, other: str, why: str) -> None:
        """A job goes to another pool than it was meant for."""
        self.redirects += 1
        self.logger.warning("%s goes from pool %s to pool %s: %s", job.label, pool, other, why)

    def note(self, child: FlowRun) -> None:
        """Keep what is told about a flow run that has ended."""
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


class _PlacedJob:
    """A job on its way: its flow run, and what has become of it once that has ended."""

    def __init__(self, placement: Placement, runs: StageRuns, job: StageJob, time_limit_seconds: float) -> None:
        self._placement, self._runs, self._job, self._limit = placement, runs, job, time_limit_seconds
        self.outcome: Manifest | StageError | None = None
        earlier = runs.known()
        adopted = next((child for child in earlier if _is_on_its_way(child)), None)
        if adopted is not None:
            where = pool_of(adopted)
            placement.logger.info("%s: found again in pool %s, flow run %s", job.label, where, adopted.id)
            self._follow(adopted)
        else:
            self._start_in(placement.pool_for(runs, job, earlier), attempt=len(earlier))

    def poll(self) -> bool:
        """Whether the flow run has ended; `outcome` then says how. One that nobody takes moves on to another pool."""
        if self.outcome is not None:
            return True
        self._child = self._runs.read(self._child)
        state = self._child.state
        assert state is not None
        if state.is_final():
            self._placement.note(self._child)
            self.outcome = outcome(self._job, self._child)
        elif state.type == StateType.SCHEDULED:
            if time.monotonic() > self._deadline:
                self._redirect()
        elif not self._is_taken:  # how long its worker needs to start it is another matter
            self._is_taken = True
            self._deadline = time.monotonic() + LOST_AFTER_LIMITS * self._limit + LOST_AFTER_SECONDS
        elif time.monotonic() > self._deadline:
            self.cancel()
            where = f"flow run {self._child.id} in pool {pool_of(self._child)}"
            self.outcome = StageError(self._job.stage, "timeout", f"{where} does not end")
        return self.outcome is not None

    def cancel(self) -> None:
        """Ask for the end of the flow run."""
        if self.outcome is None:
            self._child = self._runs.cancel(self._child)

    def _redirect(self) -> None:
        pool = self._placement.pool_instead(self._runs, self._job, pool_of(self._child))
        if pool is None:
            self._follow(self._child)
            return
        self.cancel()
        if not _is_on_its_way(self._child):
            self._placement.note(self._child)
            self._start_in(pool, attempt=len(self._runs.known()))

    def _start_in(self, pool: str, attempt: int) -> None:
        self._follow(self._runs.create(pool, attempt=attempt, time_limit_seconds=self._limit))

    def _follow(self, child: FlowRun) -> None:
        self._child, self._is_taken = child, False
        self._deadline = time.monotonic() + self._placement.redirect_after_seconds


def _is_on_its_way(child: FlowRun) -> bool:
    return child.state is not None and not (child.state.is_final() or child.state.is_cancelling())


def outcome(job: StageJob, child: FlowRun) -> Manifest | StageError:
    """The manifest that a flow run has made, or a StageError with the cause that it names."""
    state, where = child.state, f"flow run {child.id} in pool {pool_of(child)}"
    assert state is not None
    if state.is_completed():
        return committed(job) or StageError(
            job.stage,
            "NotShared",
            f"{where} has made {job.output}, which cannot be seen from here; root must be a store that both machines "
            "reach (s3://bucket/prefix)",
        )
    if state.is_crashed():
        return StageError(job.stage, "died", f"{where} crashed: {state.message}")
    if state.is_cancelled():
        return StageError(job.stage, "Cancelled", f"{where} was cancelled; retry this run to go on")
    return StageError(job.stage, state.name or "Failed", f"{where}: {state.message}")
