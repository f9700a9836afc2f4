"""Flow `grpo`: reinforcement learning of a policy with group-relative advantages, evaluated and published."""

from __future__ import annotations

from prefect import flow

from flows.evaluate import measure
from flows.publish import publish
from forge_core.artifacts import Ref
from forge_core.config import GrpoRunConfig
from tasks import stages
from tasks.run import Run, open_run


@flow(name="grpo", flow_run_name="{config.name}-seed{config.seed}", persist_result=False)
def grpo(config: GrpoRunConfig, run_id: str | None = None) -> dict[str, float | int]:
    """Improve the starting policy by its own rollouts and publish the result."""
    with open_run(config, run_id) as run:
        policy = stages.start(run.plan.start())
        measure(run, policy, step=0)
        policy = improve(run, policy)
        metrics = measure(run, policy, step=config.grpo.num_iterations)
        publish(run, policy, metrics)
        return metrics


def improve(run: Run, policy: Ref) -> Ref:
    """The policy after every GRPO iteration; the policy as it is when the config asks for none."""
    settings = run.plan.grpo_config
    if settings is None:
        return policy
    problems = stages.dataset(run.plan.dataset(settings.dataset))
    history = []
    for iteration in range(settings.num_iterations):
        rollouts = stages.rollout(run.plan.rollout(policy, problems, iteration))
        scored = stages.score(run.plan.score(rollouts, iteration))
        policy = stages.update(run.plan.update(policy, scored, iteration))
        report_iteration(run, iteration, rollouts, scored, policy)
        if run.plan.config.retention.keep_last:
            stages.prune(run.plan.run_uri, run.plan.config.retention)
        history.append(scored)
    run.tracker.record_completions(history)
    return policy


def report_iteration(run: Run, iteration: int, *artifacts: Ref) -> None:
    """Log the numbers of an iteration's artifacts, and one line for people."""
    summary: dict[str, float | int] = {}
    for artifact in artifacts:
        summary |= run.tracker.record(artifact, iteration).summary
    run.logger.info(
        "iteration %d: reward %.3f, length %.1f, %d informative groups, clip %.3f, entropy %.3f, grad norm %.2f",
        iteration,
        summary["reward/mean"],
        summary["completion/length/mean"],
        summary["groups/informative"],
        summary.get("loss/clip_fraction", 0.0),
        summary.get("entropy/mean", 0.0),
        summary.get("grad_norm/total", 0.0),
    )
