"""A run in a process of its own, started again whenever it dies, and killed at random when a drill asks for that."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import StateType
from prefect.states import Crashed

from forge_core import storage
from forge_core.config import PostTrainConfig
from forge_core.drill import DrillConfig, DrillFailedError, DrillReport
from forge_core.plan import Plan
from tasks.processes import Log
from tasks.tracking_uri import tracking_uri

END_GRACE_SECONDS = 5.0
POLL_SECONDS = 0.2
# The flow run of this process must not pass for that of its child.
_OWN_FLOW_RUN = ("PREFECT__FLOW_RUN_ID", "PREFECT__FLOW_ENTRYPOINT")


class RandomKills:
    """Kills a random process of a run (the flow's or one of its stages'), `total` times in all.

    Each kill falls at a random moment after the run has begun another stage: a run that is only starting its processes
    has nothing to lose.
    """

    def __init__(self, total: int, mean_seconds: float, seed: int, logger: Log) -> None:
        self.remaining = total
        self.victims: dict[str, int] = {}
        self._mean_seconds, self._random, self._logger = mean_seconds, random.Random(seed), logger

    @contextmanager
    def of(self, pid: int, run_uri: str) -> Iterator[None]:
        """Kill processes of the run whose flow process this is, while the block runs."""
        ended = threading.Event()

        def kill() -> None:
            num_seen = num_events(run_uri)
            while self.remaining and not ended.wait(POLL_SECONDS):
                if num_events(run_uri) > num_seen and not ended.wait(self._random.uniform(0, 2 * self._mean_seconds)):
                    self._kill_one(pid)
                    num_seen = num_events(run_uri)

        thread = threading.Thread(target=kill, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _kill_one(self, pid: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim = self._random.choice([psutil.Process(pid), *psutil.Process(pid).children(recursive=True)])
            name = _name(victim)
            victim.kill()
            self.remaining -= 1
            self.victims[name] = self.victims.get(name, 0) + 1
            self._logger.info("drill: killed the %s process, %d kills to go", name, self.remaining)


def run_to_the_end(
    config: PostTrainConfig, run_id: str, *, max_restarts: int, logger: Log, kills: RandomKills | None = None
) -> int:
    """Run post-training in a child process until it completes; returns how often it had to be started again.

    Raises DrillFailedError when it does not complete within `max_restarts` restarts.
    """
    with tempfile.TemporaryDirectory(prefix="forge-drill-") as directory:
        path = Path(directory) / "config.json"
        path.write_text(config.model_dump_json())
        command = [sys.executable, "-m", "flows.post_train", str(path), "--run-id", run_id]
        for restarts in range(max_restarts + 1):
            output = Path(directory) / f"{restarts}.log"
            with contextlib.ExitStack() as stack:
                process = stack.enter_context(_flow_process(command, output))
                if kills:
                    stack.enter_context(kills.of(process.pid, Plan(config, run_id).run_uri))
                code = process.wait()
            if code == 0:
                return restarts
            words = " | ".join(output.read_text(errors="replace").strip().splitlines()[-3:])
            logger.info("drill: %s ended with %d and is started again; its last words: %s", run_id, code, words)
            mark_crashed(run_id)
    raise DrillFailedError(f"{run_id} did not complete in {max_restarts} restarts; its last words are above")


def mark_crashed(run_id: str) -> None:
    """Tell Prefect that runs of this `run_id` whose process is gone have crashed; it cannot see a SIGKILL."""
    if not os.environ.get("PREFECT_API_URL"):
        return
    running = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING]))
    with get_client(sync_client=True) as client:
        for flow_run in client.read_flow_runs(flow_run_filter=FlowRunFilter(state=running)):
            if flow_run.parameters.get("run_id") == run_id:
                client.set_flow_run_state(flow_run.id, Crashed(message="killed by a drill"), force=True)


@contextmanager
def _flow_process(command: list[str], output: Path) -> Iterator[subprocess.Popen]:
    """A flow process that has ended when the block has."""
    env = {name: value for name, value in os.environ.items() if name not in _OWN_FLOW_RUN}
    with output.open("wb") as log:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                _end(process)


def num_events(run_uri: str) -> int:
    """How many attempts and replays a run under a fault plan has recorded so far."""
    return len(storage.list_names(f"{run_uri}/drill/events"))


def _end(process: subprocess.Popen) -> None:
    """End a flow process; its stage processes end with it."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _name(process: psutil.Process) -> str:
    command = process.cmdline()
    if "--preload" in command:
        return {"sft": "trainer", "rollout": "generator", "dataset": "scorer"}[command[command.index("--preload") + 1]]
    return "flow" if "flows.post_train" in command else "child"


def publish_report(config: DrillConfig, drill_id: str, report: DrillReport) -> None:
    """Write the report to {root}/{drill_id}/drill.json and its numbers to the MLflow experiment `forge/drill`."""
    uri = f"{Plan(config.run, drill_id).run_uri}/drill.json"
    storage.write_atomic(uri, report.model_dump_json(indent=1).encode())
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=tracking_uri())
    experiment = client.get_experiment_by_name("forge/drill")
    experiment_id = experiment.experiment_id if experiment else client.create_experiment("forge/drill")
    run = client.create_run(experiment_id, run_name=drill_id, tags={"forge.report_uri": uri})
    for name, value in report.model_dump().items():
        if isinstance(value, int | float):
            client.log_metric(run.info.run_id, f"drill/{name}", float(value))
    client.log_dict(run.info.run_id, report.model_dump(mode="json"), "drill.json")
    client.set_terminated(run.info.run_id)


def default_drill_id() -> str:
    """Named after the flow run, so that a retry goes on with the same runs."""
    return f"drill-{str(runtime.flow_run.id)[:8]}"
