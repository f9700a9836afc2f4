"""Flow `quantize`: policy -> calibrate and quantize -> measure -> gates -> publish as {name}-quantized.

    python -m flows.quantize deployments/configs/quantize.yaml [--policy URI] [--run-id ID]

A gate that fails leaves what is published alone and says why. `forge rollback NAME-quantized` goes back by one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from prefect import flow
from prefect.artifacts import create_markdown_artifact

from flows.evaluate import measure
from forge_core.artifacts import Manifest, Ref, read_manifest
from forge_core.config import load_config
from forge_core.gates import GateResult, failures
from forge_core.manifests import file_reader
from forge_core.quantization.gates import PairedAccuracy, check_gates, paired_accuracy
from forge_core.quantize_run import (
    QuantizePlan,
    QuantizeRunConfig,
    idleness,
    needed_sequences,
    num_sequences,
    quantized_name,
    stored_rollouts,
)
from tasks import stages
from tasks.run import Run, open_run

BOTH = ("before", "after")  # the policy, and its quantized form


@flow(name="quantize", flow_run_name="{config.name}-{config.quantize.scheme.name}", persist_result=False)
def quantize(config: QuantizeRunConfig, run_id: str | None = None) -> dict[str, float | int]:
    """Quantize a policy, and publish it when it passes the gates; raises QuantizationRefusedError when it does not."""
    with open_run(config, run_id) as run:
        policy = stages.start(run.plan.start())
        measure(run, policy, step=0)
        return quantize_policy(run, config, policy, step=1)


def quantize_policy(run: Run, config: QuantizeRunConfig, policy: Ref, step: int) -> dict[str, float | int]:
    """Quantize a policy that has been evaluated, and publish it when it passes; raises QuantizationRefusedError."""
    jobs = QuantizePlan(run.plan, config)
    data = calibration_data(run, jobs, policy)
    attempts = [attempt(run, jobs, policy, policy, data, step)]
    if config.qat is not None and attempts[0].misses_accuracy:
        run.logger.warning("%s; trying quantization-aware training", attempts[0].verdict)
        trained = train_for_it(run, jobs, policy, data, step + 1)
        attempts.append(attempt(run, jobs, policy, trained, data, step + 1))
    last = attempts[-1]
    if not last.is_passed:
        tried = "; after quantization-aware training ".join(one.verdict for one in attempts)
        raise QuantizationRefusedError(
            f"{last.made.uri} is not published: {tried}. {quantized_name(config)} stays what it was; try another "
            "scheme, observer or remedy, or keep the layers that its report.md names first"
        )
    name, quantized = quantized_name(config), last.made.ref
    published = stages.publish(config.root, name, quantized, run.plan.run_id, last.metrics, last.gates)
    assert published is not None  # it replaces whatever there is: it was compared with the policy it was made of
    run.tracker.register(published)
    run.logger.info("published %s -> %s", published.name, published.hf_uri)
    return last.metrics


@dataclass(frozen=True)
class Attempt:
    """One quantized policy with everything that was measured of it."""

    made: Manifest
    metrics: dict[str, float | int]
    gates: tuple[GateResult, ...]

    @property
    def is_passed(self) -> bool:
        return not failures(self.gates)

    @property
    def misses_accuracy(self) -> bool:
        """Whether it fails by what training can cure; drift of the calibration is not."""
        return any("drift" not in result.gate for result in failures(self.gates))

    @property
    def verdict(self) -> str:
        return "; ".join(result.reason for result in failures(self.gates)) or "every gate is passed"


def attempt(
    run: Run, jobs: QuantizePlan, original: Ref, policy: Ref, data: tuple[list[Ref], Ref | None], step: int
) -> Attempt:
    """Quantize a policy, and measure it against the original one."""
    quantized = stages.quantize(jobs.quantize(policy, rollouts=data[0], dataset=data[1]))
    made = run.tracker.record(quantized, step)
    accuracies = compare_accuracy(run, original, quantized, step)
    metrics = dict(made.summary)
    for one in accuracies:
        metrics |= one.metrics
    metrics |= compare_speed(run, jobs, original, quantized, step)
    run.tracker.record_numbers(metrics, step, made)
    gates = check_gates(jobs.config.quantize_gates, metrics, accuracies)
    report(run, jobs.config, made, metrics, accuracies, gates)
    return Attempt(made, metrics, gates)


def train_for_it(run: Run, jobs: QuantizePlan, policy: Ref, data: tuple[list[Ref], Ref | None], step: int) -> Ref:
    """The policy after quantization-aware training on what it was calibrated on, or on its SFT data."""
    qat = jobs.config.qat
    assert qat is not None
    if qat.data == "dataset":
        data = [], stages.dataset(run.plan.dataset(qat.sft.dataset))
    trained = stages.qat(jobs.qat(policy, rollouts=data[0], dataset=data[1]))
    run.tracker.record(trained, step)
    return trained


class QuantizationRefusedError(RuntimeError):
    """A quantized policy did not pass its gates."""


def calibration_data(run: Run, jobs: QuantizePlan, policy: Ref) -> tuple[list[Ref], Ref | None]:
    """The rollout sets, or the dataset, to calibrate on; fresh rollouts are sampled when there are too few."""
    config = jobs.config
    source = config.data.source
    if source == "dataset":
        return [], stages.dataset(run.plan.dataset(config.data.dataset))
    if source in ("auto", "stored"):
        stored = stored_rollouts(policy)
        count = num_sequences(stored)
        run.logger.info("%d stored sequences of this policy, %d needed", count, needed_sequences(config))
        if source == "stored" or count >= needed_sequences(config):
            return stored, None
    problems = stages.dataset(run.plan.dataset(config.data.dataset))
    rollouts = stages.rollout(jobs.rollout(policy, problems))
    run.tracker.record(rollouts, step=0)
    return [rollouts], None


def compare_accuracy(run: Run, policy: Ref, quantized: Ref, step: int) -> list[PairedAccuracy]:
    """Accuracy of both under every evaluation, on the same problems."""
    found = []
    measure(run, quantized, step)
    for evaluation in run.plan.config.evals:
        problems = stages.dataset(run.plan.dataset(evaluation.dataset))
        before, after = (
            read_manifest(run.plan.evaluate(one, problems, evaluation).output) for one in (policy, quantized)
        )
        assert before is not None
        assert after is not None
        found.append(paired_accuracy(evaluation.name, before, after))
    return found


def compare_speed(run: Run, jobs: QuantizePlan, policy: Ref, quantized: Ref, step: int) -> dict[str, float | int]:
    """Tokens per second of both, unless the config leaves it out."""
    config = jobs.config
    if config.speed.num_rounds == 0:
        return {}
    problems = stages.dataset(run.plan.dataset(config.evals[0].dataset))
    return run.tracker.record(stages.speed(jobs.speed(policy, quantized, problems)), step).summary


def report(
    run: Run,
    config: QuantizeRunConfig,
    made: Manifest,
    metrics: dict[str, float | int],
    accuracies: Sequence[PairedAccuracy],
    gates: tuple[GateResult, ...],
) -> None:
    """Gates, accuracies and the table of layers as a page of the Prefect UI."""
    lines = ["# Gates", ""]
    lines += [f"- {'passed' if gate.has_passed else '**FAILED**'}: {gate.reason}" for gate in gates]
    lines += ["", "# Accuracy", "", "| evaluation | before | after | drop | 95 % | lost | gained |", "|" + " --- |" * 7]
    for one in accuracies:
        interval = f"{one.drop_low:.3f} to {one.drop_high:.3f}"
        lines.append(
            f"| {one.name} | {one.before:.3f} | {one.after:.3f} | {one.drop:.3f} | {interval} | {one.num_lost} | "
            f"{one.num_gained} |"
        )
    lines += ["", f"Size: {metrics['quantize/size_ratio']:.2f} times smaller (aim: 2 to 4)."]
    if "quantize/speed_ratio" in metrics:
        lines.append(
            f"Speed: {metrics['quantize/speed_ratio']:.2f} times that of the unquantized policy (aim: 2 to 4)."
        )
        sizes = " and ".join(f"{metrics[f'quantize/engine_bytes/{which}'] / 2**20:.0f} MiB" for which in BOTH)
        uses = " and ".join(f"{metrics[f'quantize/busy/{which}']:.0%}" for which in BOTH)
        lines += ["", f"Memory of the engines: {sizes}. Accelerator in use: {uses}."]
        if (advice := idleness(config, metrics["quantize/busy/after"])) is not None:
            lines += ["", advice]
            run.logger.warning("%s", advice)
    table = file_reader(made, "report.md")().decode().replace("(layers.png)", f"({made.files_uri}/layers.png)")
    create_markdown_artifact(
        key="quantized-policy",
        description=f"{config.name} after run {run.plan.run_id}",
        markdown="\n".join(lines) + "\n\n" + table,
    )
    for gate in gates:
        run.logger.log(20 if gate.has_passed else 40, "gate: %s", gate.reason)


def main() -> None:
    """Command line: quantize by a config file."""
    parser = argparse.ArgumentParser(prog="python -m flows.quantize", description="Quantize a policy by a config.")
    parser.add_argument("config", help="a YAML file, e.g. deployments/configs/quantize.yaml")
    parser.add_argument("--policy", help="replace the config's policy.uri")
    parser.add_argument("--run-id", help="continue or name a run")
    arguments = parser.parse_args()
    config = load_config(arguments.config, QuantizeRunConfig)
    if arguments.policy is not None:
        config = config.model_copy(update={"policy": config.policy.model_copy(update={"uri": arguments.policy})})
    quantize(config, run_id=arguments.run_id)


if __name__ == "__main__":
    main()
