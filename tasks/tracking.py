"""MLflow: one run per flow run, one nested run per stage, every number logged once however often a run is resumed.

Runs are found again by tag, and each metric carries the time its artifact was committed, so logging a manifest a
second time writes the same points. Logging happens in a thread of its own, in order: while the tracking server does not
answer, entries wait and are tried again with the next one, and the run goes on.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from forge_core.artifacts import Manifest, Ref, resolve
from forge_core.gates import GateResult
from forge_core.lineage import as_tree, upstream
from forge_core.lineage_text import flatten
from forge_core.manifests import file_reader
from forge_core.plan import Plan
from forge_core.publication import Publication
from forge_core.samples import sample_completions
from tasks.lineage_tracking import dataset_input, manifest_tags, model_tags
from tasks.processes import Log
from tasks.registry import follow_history, gate_tags, version_of
from tasks.tracking_uri import local_home, tracking_uri

if TYPE_CHECKING:
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

MAX_PARAM_CHARS = 6000
PARAMS_PER_BATCH = 100
METRICS_PER_BATCH = 1000
HISTORY = "history.jsonl"  # of a training on a fixed dataset, see forge_core/stages/fit.py


class Tracker:
    """What a flow tells MLflow about its artifacts."""

    def __init__(self, plan: Plan, tags: dict[str, str] | None, logger: Log) -> None:
        self._plan = plan
        self._tags = tags or {}
        self._logger = logger
        self._system: SystemMetricsMonitor | None = None
        self._stage_runs: dict[str, str] = {}
        self._inputs: set[tuple[str, str]] = set()  # (run, digest) of the datasets logged
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._num_lost = 0
        self._thread = threading.Thread(target=self._drain, name="mlflow", daemon=True)
        self._thread.start()
        self._work.put(self._open)

    def record(self, artifact: Ref, step: int) -> Manifest:
        """Log the numbers of an artifact's manifest at a step; returns the manifest."""
        manifest = resolve(artifact)
        self._work.put(lambda: self._log_manifest(manifest, step))
        return manifest

    def record_numbers(self, metrics: dict[str, float | int], step: int, beside: Manifest) -> None:
        """Log numbers that stand in no manifest, at the time of the artifact that they belong to."""
        self._work.put(lambda: self._log_metrics(self._run_id, metrics, step, beside, {}))

    def record_completions(self, scored: list[Ref], per_set: int = 8) -> None:
        """Log a table of sample completions, the first ones of each rollout set."""
        self._work.put(lambda: self._log_completions(scored, per_set))

    def record_files(self, files: dict[str, bytes]) -> None:
        """Log files by name; those of an earlier attempt are replaced."""
        self._work.put(lambda: self._log_files(files))

    def register(self, published: Publication) -> None:
        """Register a published policy in the model registry; the aliases follow the history of its name."""
        self._work.put(lambda: self._register(published.name, published.policy, published.gates))

    def register_refused(self, name: str, policy: Ref, gates: tuple[GateResult, ...]) -> None:
        """Register a policy that was not published, with the gates that it did not pass."""
        self._work.put(lambda: self._register(name, policy, gates))

    def close(self, status: str) -> None:
        """Flush what is queued and end the runs with FINISHED or FAILED."""
        self._work.put(lambda: self._end(status))
        self._work.put(None)
        self._thread.join(timeout=120)
        if self._num_lost or self._thread.is_alive():
            self._logger.warning("MLflow lacks %d entries or more; the manifests hold every number", self._num_lost)

    def _drain(self) -> None:
        waiting: deque[Callable[[], None]] = deque()
        while (work := self._work.get()) is not None:
            waiting.append(work)
            while waiting:
                try:
                    waiting[0]()
                except Exception as error:
                    if _is_unreachable(error):
                        self._logger.warning("MLflow does not answer, %d entries wait: %s", len(waiting), error)
                        break
                    self._num_lost += 1
                    self._logger.warning("MLflow refused an entry: %s", error)
                waiting.popleft()
        self._num_lost += len(waiting)

    def _open(self) -> None:
        # Imported here: it takes seconds, which pass in this thread while the first stage starts.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # the default waits for minutes
        import mlflow
        from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        logging.getLogger("alembic").setLevel(logging.WARNING)
        self._client = mlflow.MlflowClient(tracking_uri=tracking_uri())
        plan = self._plan
        name = f"forge/{plan.config.name}"
        experiment = self._client.get_experiment_by_name(name)
        # A server knows where its artifacts go; a bare SQLite file would leave them in the working directory.
        place = None if os.environ.get("MLFLOW_TRACKING_URI") else (local_home() / "mlflow-artifacts").as_uri()
        self._experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(name, artifact_location=place)
        )
        tags = {"forge.run_uri": plan.run_uri, "forge.run_id": plan.run_id} | self._tags
        self._run_id = self._find_or_create(f"tags.`forge.run_uri` = '{plan.run_uri}'", plan.run_id, tags)
        self._log_params(self._run_id, flatten(plan.config.model_dump(mode="json")))
        self._client.log_dict(self._run_id, plan.config.model_dump(mode="json"), "config.json")
        if MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get():
            self._system = SystemMetricsMonitor(self._run_id, resume_logging=True, tracking_uri=tracking_uri())
            self._system.start()

    def _log_manifest(self, manifest: Manifest, step: int) -> None:
        stage = str(manifest.job["stage"])
        seconds = sum(manifest.timings.values())
        metrics = manifest.summary | {f"time/{stage}_seconds": seconds}
        metrics |= {
            f"time/{stage}_{phase}_seconds": value for phase, value in manifest.timings.items() if phase != stage
        }
        stage_run = self._stage_run(manifest, stage)
        self._log_metrics(self._run_id, metrics, step, manifest, {})
        self._log_metrics(stage_run, metrics, step, manifest, manifest_tags(manifest))
        if any(file.path == HISTORY for file in manifest.files):
            self._log_history(manifest, stage, (self._run_id, stage_run))
        name = manifest.uri.removeprefix(self._plan.run_uri).strip("/").replace("/", "-")
        self._client.log_dict(stage_run, manifest.model_dump(mode="json"), f"manifests/step{step:04d}-{name}.json")
        datasets = [ref for ref in manifest.inputs.values() if ref.kind == "dataset"]
        self._log_inputs(self._run_id, datasets)
        self._log_inputs(stage_run, [*datasets, *(ref for ref in manifest.inputs.values() if ref.kind == "rollouts")])

    def _log_history(self, manifest: Manifest, stage: str, run_ids: tuple[str, ...]) -> None:
        """The curves of a training, a point for each optimizer step, under `{stage}/step/`."""
        lines = [json.loads(line) for line in file_reader(manifest, HISTORY)().splitlines()]
        points = [
            (f"{stage}/step/{name}", value, line["step"])
            for line in lines
            for name, value in line.items()
            if name != "step"
        ]
        for run_id in run_ids:
            self._log_points(run_id, points, manifest)

    def _log_inputs(self, run_id: str, refs: list[Ref]) -> None:
        new = [ref for ref in refs if (run_id, ref.digest) not in self._inputs]
        if new:
            self._client.log_inputs(run_id, [dataset_input(ref) for ref in new])
            self._inputs.update((run_id, ref.digest) for ref in new)

    def _stage_run(self, manifest: Manifest, stage: str) -> str:
        if stage not in self._stage_runs:
            tags = {
                "mlflow.parentRunId": self._run_id,
                "forge.stage": stage,
                "forge.stage_key": f"{self._plan.run_uri}/{stage}",
                **{f"forge.software.{name}": version for name, version in manifest.software.items()},
            }
            self._stage_runs[stage] = self._find_or_create(
                f"tags.`forge.stage_key` = '{tags['forge.stage_key']}'", stage, tags
            )
            job = {name: value for name, value in manifest.job.items() if name not in manifest.inputs}
            params = flatten(
                {
                    name: value
                    for name, value in job.items()
                    if name not in ("output", "first_prompt", "snapshot_output")
                }
            )
            self._log_params(self._stage_runs[stage], params)
        return self._stage_runs[stage]

    def _log_completions(self, scored: list[Ref], per_set: int) -> None:
        rows = []
        for iteration, ref in enumerate(scored):
            for row in sample_completions(ref, per_set):
                by_function = {f"reward by {name}": value for name, value in row.pop("rewards").items()}
                rows.append({"iteration": iteration} | row | by_function)
        if rows:
            table = {name: [row[name] for row in rows] for name in rows[0]}
            # log_table appends to a table that is there already, which would repeat its rows after a resume.
            existing = {file.path for file in self._client.list_artifacts(self._run_id)}
            if "completions.json" not in existing:
                self._client.log_table(self._run_id, table, "completions.json")

    def _log_files(self, files: dict[str, bytes]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            for name, content in files.items():
                (Path(directory) / name).write_bytes(content)
            self._client.log_artifacts(self._run_id, directory)

    def _register(self, name: str, policy: Ref, gates: tuple[GateResult, ...]) -> None:
        lineage = upstream(policy)
        self._client.log_text(self._run_id, lineage.model_dump_json(indent=1), "lineage.json")
        self._client.log_text(self._run_id, as_tree(lineage), "lineage.txt")
        verdict = gate_tags(gates)
        for key, value in verdict.items():
            self._client.set_tag(self._run_id, key, value)
        tags = model_tags(policy, self._plan, lineage) | verdict
        hf_uri = resolve(policy).files_uri
        version = version_of(self._client, name, hf_uri, run_id=self._run_id, tags=tags)
        self._client.set_registered_model_alias(name, "challenger", version.version)
        follow_history(self._client, self._plan.config.root, name)

    def _find_or_create(self, query: str, name: str, tags: dict[str, str]) -> str:
        from mlflow.entities import RunTag

        found = self._client.search_runs([self._experiment_id], query, max_results=1)
        if found:
            self._client.update_run(found[0].info.run_id, status="RUNNING")
            self._client.log_batch(found[0].info.run_id, tags=[RunTag(key, value) for key, value in tags.items()])
            return found[0].info.run_id
        return self._client.create_run(self._experiment_id, run_name=name, tags=tags).info.run_id

    def _log_params(self, run_id: str, params: dict[str, str]) -> None:
        from mlflow.entities import Param

        # MLflow keeps the first value of a parameter; config.json has what the run was last started with.
        known = self._client.get_run(run_id).data.params
        entries = [Param(name, value[:MAX_PARAM_CHARS]) for name, value in params.items() if name not in known]
        for begin in range(0, len(entries), PARAMS_PER_BATCH):
            self._client.log_batch(run_id, params=entries[begin : begin + PARAMS_PER_BATCH])

    def _log_metrics(
        self, run_id: str, metrics: dict[str, float | int], step: int, manifest: Manifest, tags: dict[str, str]
    ) -> None:
        from mlflow.entities import RunTag

        points = [(name, value, step) for name, value in metrics.items()]
        self._log_points(run_id, points, manifest)
        self._client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])

    def _log_points(self, run_id: str, points: list[tuple[str, float, int]], manifest: Manifest) -> None:
        """Log numbers with their steps at the time of an artifact, so that logging them again changes nothing."""
        from mlflow.entities import Metric

        timestamp = round(datetime.fromisoformat(manifest.created_at).timestamp() * 1000)
        entries = [Metric(metric_name(name), float(value), timestamp, step) for name, value, step in points]
        for begin in range(0, len(entries), METRICS_PER_BATCH):
            self._client.log_batch(run_id, metrics=entries[begin : begin + METRICS_PER_BATCH])

    def _end(self, status: str) -> None:
        if self._system is not None:
            self._system.finish()
        for run_id in (*self._stage_runs.values(), self._run_id):
            self._client.set_terminated(run_id, status)


def metric_name(name: str) -> str:
    """The name as MLflow takes it: an underscore for each character that it refuses, such as @ and parentheses."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


def _is_unreachable(error: Exception) -> bool:
    return isinstance(error, OSError) or "API request to" in str(error)


@contextmanager
def tracking(plan: Plan, tags: dict[str, str] | None, logger: Log) -> Iterator[Tracker]:
    """A tracker that is flushed and closed at the end of the block; `tags` describe the run beyond its plan."""
    tracker = Tracker(plan, tags, logger)
    try:
        yield tracker
    except BaseException:
        tracker.close("FAILED")
        raise
    tracker.close("FINISHED")
