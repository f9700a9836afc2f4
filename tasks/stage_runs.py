"""The flow runs of `stage/<pool>` on the Prefect server: made, found again by their job, ended."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, WorkPoolStatus
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import run_deployment
from prefect.states import Cancelling

from forge_core.placement_config import PoolState
from forge_core.stage_job import StageJob

POLL_SECONDS = 1.0

Log = logging.Logger | logging.LoggerAdapter
Answer = TypeVar("Answer")


class StageRuns:
    """The flow runs that there are for one job. A server that does not answer is asked until it does."""

    def __init__(self, client: SyncPrefectClient, job: StageJob, logger: Log) -> None:
        self._client, self._job, self._logger = client, job, logger
        # The same for every attempt and every parent: what it makes, and where.
        self._tag = f"job:{hashlib.sha256(f'{job.output} {job.digest()}'.encode()).hexdigest()[:16]}"

    def known(self) -> list[FlowRun]:
        """All of them, the newest first."""
        wanted = FlowRunFilter(tags=FlowRunFilterTags(all_=[self._tag]))
        newest_first = FlowRunSort.EXPECTED_START_TIME_DESC
        return self._ask(lambda: self._client.read_flow_runs(flow_run_filter=wanted, sort=newest_first))

    def create(self, pool: str, *, attempt: int, time_limit_seconds: float) -> FlowRun:
        """The flow run of an attempt in a pool; two parents that ask for the same attempt get the same run."""
        parameters = {
            "job": self._job.as_json(),
            "digest": self._job.digest(),
            "time_limit_seconds": time_limit_seconds,
        }
        child = self._ask(
            lambda: run_deployment(
                f"stage/{pool}",
                parameters=parameters,
                flow_run_name=self._job.label,
                timeout=0,
                tags=["forge", self._tag],
                idempotency_key=f"{self._tag}-{attempt}",
            )
        )
        assert isinstance(child, FlowRun)  # not a coroutine: a stage task is not async
        self._logger.info("%s -> pool %s, flow run %s", self._job.label, pool, child.id)
        return child

    def read(self, child: FlowRun) -> FlowRun:
        """The flow run as it is now."""
        return self._ask(lambda: self._client.read_flow_run(child.id))

    def cancel(self, child: FlowRun) -> FlowRun:
        """The flow run after it was told to end. One that no worker has taken yet is Cancelled and never begins."""
        self._ask(lambda: self._client.set_flow_run_state(child.id, Cancelling()))
        return self.read(child)

    def pool_states(self, pools: Iterable[str]) -> dict[str, PoolState]:
        """What can be known about pools before one has tried them."""
        return {pool: self._pool_state(pool) for pool in pools}

    def _pool_state(self, name: str) -> PoolState:
        pool = self._ask(lambda: self._client.read_work_pool(name))
        if pool.is_paused:
            return "paused"
        if pool.status == WorkPoolStatus.NOT_READY:
            return "without a worker"
        is_full = pool.concurrency_limit is not None and (pool.active_slots or 0) >= pool.concurrency_limit
        return "full" if is_full else "ready"

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        """The server's answer, when it has one again: its restart must not end a stage that runs elsewhere."""
        while True:
            try:
                return question()
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                if isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500:
                    raise
                self._logger.warning("the Prefect server does not answer, asking again: %r", error)
                time.sleep(POLL_SECONDS)


def pool_of(child: FlowRun) -> str:
    """Name of the work pool of a flow run."""
    return child.work_pool_name or "no pool"
