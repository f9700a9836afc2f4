"""Publication, the last step of every training flow: a policy that passes the gates becomes the champion."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact
from prefect.flow_runs import pause_flow_run

from forge_core import publication
from forge_core.artifacts import Ref, resolve
from forge_core.comparison import PairedDifference
from forge_core.evaluations import compare
from forge_core.gates import GateResult, failures, judge
from forge_core.holds import hold
from forge_core.publication import Publication
from tasks import stages
from tasks.notify import notify
from tasks.run import Run

Numbers = dict[str, float | int]
POLL_SECONDS = 5  # between two looks whether a person has resumed the run


def publish(run: Run, policy: Ref, metrics: Numbers) -> Publication | None:
    """Point the config's name at a policy, register it in MLflow, and leave a summary in the Prefect UI.

    None when a gate of the config was not passed: then the champion stays, and log, page and registry say why.
    """
    config = run.plan.config
    published = publication.find_published(config.root, config.name, policy, run.plan.run_id)
    results = published.gates if published else ()
    made = None
    while made is None:
        champion = publication.champion(config.root, config.name)
        if published is None and config.gates.are_set:
            results = pass_gates(run, policy, champion, metrics)
            if failures(results):
                refuse(run, policy, metrics, results)
                return None
        if published is None and config.gates.wait_for_approval_seconds is not None:
            wait_for_approval(run, policy, metrics, results, config.gates.wait_for_approval_seconds)
        replaces = (champion.version if champion else 0) if config.gates.are_set else None
        made = stages.publish(config.root, config.name, policy, run.plan.run_id, metrics, results, replaces)
    run.tracker.register(made)
    if published is None:  # else an earlier attempt of this run has told
        text = f"{config.name}: version {made.version} published by {run.plan.run_id}"
        notify(config, run.plan.run_id, "published", text, run.logger, version=made.version, uri=made.policy.uri)
    show(run, made.hf_uri, f"published as version {made.version}", metrics, results)
    run.logger.info("published %s -> %s", config.name, made.hf_uri)
    return made


def pass_gates(run: Run, policy: Ref, champion: Publication | None, metrics: Numbers) -> tuple[GateResult, ...]:
    """How a policy fares at the gates of the config, against the champion on the same problems and engine."""
    config = run.plan.config
    versus: dict[str, PairedDifference | None] = {evaluation.name: None for evaluation in config.evals}
    if champion is not None and config.gates.max_accuracy_drop is not None:
        with hold(config.root, champion.policy, f"champion {config.name} is compared with {run.plan.run_id}"):
            for evaluation in config.evals:
                problems = stages.dataset(run.plan.dataset(evaluation.dataset))
                own = stages.evaluate(run.plan.evaluate(policy, problems, evaluation))
                other = stages.evaluate(run.plan.evaluate(champion.policy, problems, evaluation, is_champion=True))
                versus[evaluation.name] = compare(resolve(other), resolve(own))["accuracy"]
    results = judge(config.gates, resolve(policy).summary | metrics, versus)
    for result in results:
        run.logger.log(
            20 if result.has_passed else 40, "gate %s: %s", "passed" if result.has_passed else "FAILED", result.reason
        )
    return results


def wait_for_approval(run: Run, policy: Ref, metrics: Numbers, results: tuple[GateResult, ...], seconds: int) -> None:
    """Pause the run until a person resumes it; asked once, also when the champion changes meanwhile."""
    show(run, resolve(policy).files_uri, "waiting for approval: press Resume to publish it", metrics, results)
    run.logger.warning("%s waits for approval: press Resume in the Prefect UI to publish it", run.plan.config.name)
    pause_flow_run(timeout=seconds, poll_interval=POLL_SECONDS, key=f"approval-{policy.digest[:16]}")


def refuse(run: Run, policy: Ref, metrics: Numbers, results: tuple[GateResult, ...]) -> None:
    """Say everywhere why the champion stays."""
    name, failed = run.plan.config.name, failures(results)
    run.tracker.register_refused(name, policy, results)
    show(run, resolve(policy).files_uri, f"not published, {len(failed)} gates failed", metrics, results)
    reason = "; ".join(result.reason for result in failed)
    run.logger.error("%s keeps its champion: %s", name, reason)
    text = f"{name} keeps its champion, {run.plan.run_id} is not published: {reason}"
    notify(run.plan.config, run.plan.run_id, "refused", text, run.logger, uri=policy.uri)


def show(run: Run, uri: str, outcome: str, metrics: Numbers, results: tuple[GateResult, ...]) -> None:
    """A page in the Prefect UI: what became of the policy, its gates and its metrics."""
    rows = "\n".join(f"| {name} | {value:.4g} |" for name, value in sorted(metrics.items()))
    gates = "\n".join(
        f"| {'passed' if one.has_passed else '**FAILED**'} | {one.gate} | {one.reason} |" for one in results
    )
    page = f"# {run.plan.config.name}: {outcome}\n\n`{uri}`\n\n"
    if gates:
        page += f"| | gate | |\n| --- | --- | --- |\n{gates}\n\n"
    create_markdown_artifact(
        key="published-policy",
        description=f"{run.plan.config.name} after run {run.plan.run_id}: {outcome}",
        markdown=f"{page}| metric | value |\n| --- | --- |\n{rows}\n",
    )
