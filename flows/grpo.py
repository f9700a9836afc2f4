"""Flow `grpo`: reinforcement learning of a policy with group-relative advantages, evaluated and published."""

from __future__ import annotations

from contextlib import nullcontext

from prefect import flow

from flows.evaluate import measure
from flows.publish import publish
from flows.recalibrate import Recalibration
from flows.sampling import Batch, sample
from flows.training_data import training_data
from forge_core.alarms import find_alarms, stop_if_asked
from forge_core.artifacts import Ref
from forge_core.config import GrpoConfig, GrpoRunConfig
from forge_core.holds import hold
from tasks import stages
from tasks.final_report import write_report
from tasks.iteration_report import IterationReport
from tasks.notify import BAD_END
from tasks.run import Run, open_run


@flow(
    name="grpo",
    flow_run_name="{config.name}-seed{config.seed}",
    persist_result=False,
    on_failure=BAD_END,
    on_crashed=BAD_END,
)
def grpo(config: GrpoRunConfig, run_id: str | None = None) -> dict[str, float | int]:
    """Improve the starting policy by its own rollouts and publish the result."""
    with open_run(config, run_id) as run:
        policy = stages.start(run.plan.start())
        measure(run, policy, step=0)
        policy = improve(run, policy)
        metrics = measure(run, policy, step=config.grpo.num_iterations)
        write_report(run)
        publish(run, policy, metrics)
        return metrics


def improve(run: Run, policy: Ref) -> Ref:
    """The policy after every GRPO iteration; the policy as it is when the config asks for none."""
    settings = run.plan.grpo_config
    if settings is None:
        return policy
    problems = training_data(run, settings.dataset, step=0)
    reference = policy if settings.kl is not None else None
    report = IterationReport(run.plan, settings.num_iterations, run.logger)
    samples: list[list[Batch]] = []  # by iteration
    recalibration = Recalibration(run)
    # Retention must not take the files of the policy that every iteration is compared with.
    with hold(run.plan.config.root, reference, "reference policy") if reference else nullcontext():
        for iteration in range(settings.num_iterations):
            earlier_refills = sum(len(batches) - 1 for batches in samples)
            batches = sample(run, policy, reference, problems, iteration, earlier_refills)
            policy = stages.update(run.plan.update(policy, [batch.scored for batch in batches], iteration))
            report_iteration(run, report, iteration, batches[0], policy)
            if is_measured_after(iteration, settings):
                measure(run, policy, step=iteration + 1)
            recalibration.after_update(policy, batches[0].rollouts, iteration)
            samples.append(batches)
            if run.plan.config.retention.keep_last:
                stages.prune(run.plan.run_uri, run.plan.config.retention)
    run.tracker.record_completions([batches[0].scored for batches in samples])
    return policy


def is_measured_after(iteration: int, settings: GrpoConfig) -> bool:
    """Whether the policy of an iteration is evaluated on the way; that of the last one always is, by the flow."""
    done = iteration + 1
    return settings.evaluate_every > 0 and done % settings.evaluate_every == 0 and done < settings.num_iterations


def report_iteration(run: Run, report: IterationReport, iteration: int, batch: Batch, policy: Ref) -> None:
    """Log and show the numbers of an iteration's artifacts, one line for people, and what is out of bounds.

    Of several generation batches the first stands for all: its prompts are not chosen by what they are good for.
    """
    settings = run.plan.grpo_config
    assert settings is not None
    artifacts = [batch.rollouts, batch.reference_logprobs, batch.scored, policy]
    manifests = [run.tracker.record(artifact, iteration) for artifact in artifacts if artifact is not None]
    summary: dict[str, float | int] = {}
    for manifest in manifests:
        summary |= manifest.summary
    summary["time/iteration_seconds"] = sum(sum(manifest.timings.values()) for manifest in manifests)
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
    alarms = find_alarms(summary, settings.alarms)
    for sentence in alarms.values():
        run.logger.warning("ALARM in iteration %d: %s", iteration, sentence)
    run.tracker.record_numbers({"alarms/raised": len(alarms)}, iteration, manifests[-1])
    report.add(summary, batch.scored, list(alarms.values()))
    stop_if_asked(alarms, settings.alarms)
