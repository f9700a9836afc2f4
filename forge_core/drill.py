"""Drills: the plan of faults that a run is put through, and what came of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

from pydantic import Field

from forge_core import storage
from forge_core.artifacts import Manifest, read_manifest
from forge_core.config import PostTrainConfig
from forge_core.credentials import StoredSettings
from forge_core.faults import Fault, FaultPlan, Point
from forge_core.manifests import FOLDERS
from forge_core.plan import Plan
from forge_core.settings import Settings

# Where a killed process leaves something half done: amid its work, with files but no manifest, with a manifest that its
# owner has not heard of.
KILL_POINTS: tuple[Point, ...] = ("work", "before_commit", "after_commit")
# Their files differ between equal states (torch writes its own metadata), and they decide nothing: replay does.
NOT_COMPARED = ("train_states",)


class DrillConfig(StoredSettings):
    """A small post-training that is disturbed on purpose and compared with an undisturbed one."""

    run: PostTrainConfig = Field(default_factory=PostTrainConfig, description="The post-training to disturb")
    faults: tuple[Fault, ...] | None = Field(None, description="Faults to inject; None: each stage at three points")
    random_kills: int = Field(
        0, ge=0, description="Kills of random processes at random moments, spread over as many runs as that takes"
    )
    seconds_to_kill: float = Field(
        2.0, gt=0, description="Mean time from the moment a run has begun another stage to the next random kill"
    )
    max_restarts: int = Field(20, ge=0, description="Restarts of a run's flow process before the drill gives up")


class DrillFailedError(RuntimeError):
    """A disturbed run ended with other artifacts than the undisturbed one, or did not end."""


class Outcome(Settings):
    """What happened to one disturbed run, from the record its stage processes kept."""

    struck: tuple[Fault, ...]
    stages: int = Field(description="Artifacts it made")
    attempts: int = Field(description="Stages begun, again or for the first time")
    replays: int
    restarts: int
    different: tuple[str, ...]


class DrillReport(Settings):
    """What a drill did and found."""

    faults: int = Field(description="Faults that struck, random kills included")
    faults_by_action: dict[str, int]
    not_struck: tuple[str, ...] = Field(description="Planned faults whose moment never came")
    runs: int = Field(description="Disturbed runs; all of them came to their end")
    restarts: int = Field(description="Times a flow process had to be started again")
    stages_total: int = Field(description="Artifacts of the disturbed runs")
    stages_redone: int = Field(description="Attempts beyond the first of a stage")
    updates_replayed: int = Field(
        description="Updates repeated in memory, from stored rollouts, to get an optimizer back"
    )
    digests_equal: bool = Field(description="Whether every artifact has the digest of the undisturbed run's")
    different: tuple[str, ...]
    seconds_undisturbed: float
    seconds_disturbed: float = Field(description="Wall time of all disturbed runs")
    seconds_lost_per_fault: float

    def markdown(self) -> str:
        """The report for people."""
        actions = ", ".join(f"{count} {action}" for action, count in sorted(self.faults_by_action.items()))
        rows = {
            "faults that struck": f"{self.faults}: {actions}",
            "planned faults whose moment never came": ", ".join(self.not_struck) or "none",
            "runs / restarts of the flow process": f"{self.runs} / {self.restarts}",
            "stages redone": f"{self.stages_redone} of {self.stages_total}",
            "updates replayed in memory": str(self.updates_replayed),
            "artifacts that differ": ", ".join(self.different) or "none",
            "seconds of the undisturbed run": f"{self.seconds_undisturbed:.1f}",
            "seconds of the disturbed runs": f"{self.seconds_disturbed:.1f}",
            "seconds lost per fault": f"{self.seconds_lost_per_fault:.1f}",
        }
        table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
        return f"# Drill: digests {'equal' if self.digests_equal else 'DIFFER'}\n\n| | |\n| --- | --- |\n{table}\n"


def default_faults(config: PostTrainConfig) -> tuple[Fault, ...]:
    """Each stage killed at three points, the flow killed twice, a NaN, and each kind of storage fault."""
    plan = Plan(config, "drill")
    faults: list[Fault] = []
    for stage, jobs in _labels(plan).items():
        faults += [
            Fault(job=jobs[place % len(jobs)], action="kill", at=point) for place, point in enumerate(KILL_POINTS)
        ]
        if stage == "update":
            faults.append(Fault(job=jobs[-1], action="not_finite"))
    faults += [
        Fault(job="rollout", action="kill_flow", at="work"),
        Fault(job="update", action="kill_all", at="after_commit"),
        Fault(job="rollout", action="unavailable", at="upload", times=2),
        Fault(job="score", action="reset", at="create"),
        Fault(job="update", action="tear", at="upload"),
        Fault(job="score", action="lose", at="upload"),
        Fault(job="evaluate", action="slow", at="read"),
    ]
    return tuple(faults)


def disturbed(config: DrillConfig) -> PostTrainConfig:
    """The run with the drill's faults in it."""
    planned = config.faults
    if planned is None:
        planned = () if config.random_kills else default_faults(config.run)
    return config.run.model_copy(update={"fault_plan": FaultPlan(faults=planned)})


def artifacts_of(config: DrillConfig, run_id: str) -> dict[str, Manifest]:
    """Every committed artifact of a run by its name, such as policies/v0003."""
    run_uri = Plan(config.run, run_id).run_uri
    names = [f"{kind}/{name}" for kind in FOLDERS for name in storage.list_names(f"{run_uri}/{kind}")]
    for version in storage.list_names(f"{run_uri}/evals"):
        names += [f"evals/{version}/{name}" for name in storage.list_names(f"{run_uri}/evals/{version}")]
    found = {name: read_manifest(f"{run_uri}/{name}") for name in names}
    return {name: manifest for name, manifest in found.items() if manifest is not None}


def outcome(config: DrillConfig, run_id: str, expected: dict[str, Manifest], *, restarts: int) -> Outcome:
    """What happened to a disturbed run, compared with the artifacts of the undisturbed one."""
    run_uri = Plan(config.run, run_id).run_uri
    events = list(_entries(f"{run_uri}/drill/events"))
    found = artifacts_of(config, run_id)
    return Outcome(
        struck=tuple(Fault.model_validate(entry["fault"]) for entry in _entries(f"{run_uri}/drill/faults")),
        stages=sum(not name.startswith(NOT_COMPARED) for name in found),
        attempts=sum(event["event"] == "attempt" for event in events),
        replays=sum(event["event"] == "replay" for event in events),
        restarts=restarts,
        different=_differing(expected, found),
    )


def summarise(
    config: DrillConfig,
    outcomes: list[Outcome],
    *,
    random_kills: dict[str, int],
    seconds_undisturbed: float,
    seconds_disturbed: float,
) -> DrillReport:
    """The report over all disturbed runs; `random_kills` counts victims by what kind of process they were."""
    struck = [fault for outcome in outcomes for fault in outcome.struck]
    actions = Counter(fault.action for fault in struck) + Counter(
        {f"kill of the {name} at random": count for name, count in random_kills.items()}
    )
    plan = disturbed(config).fault_plan
    missed = [fault for fault in plan.faults if fault not in struck] if plan else []
    different = tuple(sorted({name for outcome in outcomes for name in outcome.different}))
    faults = sum(actions.values())
    return DrillReport(
        faults=faults,
        faults_by_action=dict(actions),
        not_struck=tuple(f"{fault.action} at {fault.at} of {fault.job}" for fault in missed),
        runs=len(outcomes),
        restarts=sum(outcome.restarts for outcome in outcomes),
        stages_total=sum(outcome.stages for outcome in outcomes),
        stages_redone=sum(outcome.attempts - outcome.stages for outcome in outcomes),
        updates_replayed=sum(outcome.replays for outcome in outcomes),
        digests_equal=not different,
        different=different,
        seconds_undisturbed=seconds_undisturbed,
        seconds_disturbed=seconds_disturbed,
        seconds_lost_per_fault=(seconds_disturbed - len(outcomes) * seconds_undisturbed) / max(1, faults),
    )


def _differing(expected: dict[str, Manifest], found: dict[str, Manifest]) -> tuple[str, ...]:
    names = {name for name in expected.keys() | found.keys() if not name.startswith(NOT_COMPARED)}
    digests = [{name: manifest.digest for name, manifest in run.items()} for run in (expected, found)]
    return tuple(sorted(name for name in names if digests[0].get(name) != digests[1].get(name)))


def _labels(plan: Plan) -> dict[str, list[str]]:
    """Labels of the jobs of a run by stage, in the order they are run."""
    labels: dict[str, list[str]] = {"dataset": ["dataset"], "start": ["start"], "evaluate": ["evaluate"]}
    if plan.sft_config is not None:
        labels["sft"] = ["sft"]
    grpo = plan.grpo_config
    sampled = ("rollout", "reference", "score") if grpo and grpo.kl else ("rollout", "score")
    for iteration in range(grpo.num_iterations if grpo else 0):
        version = plan.version(iteration)
        for stage, made in (*((stage, version) for stage in sampled), ("update", version + 1)):
            labels.setdefault(stage, []).append(f"{stage} v{made:04d}")
    return labels


def _entries(prefix: str) -> Iterator[dict]:
    for name in storage.list_names(prefix):
        yield json.loads(storage.read_bytes(f"{prefix}/{name}"))
