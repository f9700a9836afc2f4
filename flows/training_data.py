"""Training data of a run: materialised, and compared with the evaluations before anything is learned from them."""

from __future__ import annotations

from forge_core.artifacts import Ref
from forge_core.data_config import DatasetConfig
from forge_core.side_jobs import overlap_job
from tasks import stages
from tasks.run import Run


def training_data(run: Run, dataset: DatasetConfig, step: int) -> Ref:
    """The dataset's artifact. Raises ValueError when more of an evaluation is in it than `overlap.max_fraction`."""
    examples, plan = stages.dataset(run.plan.dataset(dataset)), run.plan
    if not plan.config.evals:
        return examples
    held_out = [stages.dataset(plan.dataset(evaluation.dataset)) for evaluation in plan.config.evals]
    report = run.tracker.record(stages.overlap(overlap_job(plan, examples, held_out)), step)
    limit = plan.config.overlap.max_fraction
    for evaluation in plan.config.evals:
        exact, near, fraction = (
            report.summary[f"overlap/{evaluation.name}/{name}"] for name in ("exact", "near", "fraction")
        )
        if not fraction:
            continue
        sentence = (
            f"{exact:.0f} problems of the evaluation {evaluation.name} are in the training data {dataset.fn}, and "
            f"{near:.0f} share a run of words with it ({100 * fraction:.1f} % together); {report.uri} lists them in "
            "overlap.jsonl"
        )
        if limit is not None and fraction > limit:
            raise ValueError(f"{sentence}. overlap.max_fraction is {limit:g}: leave them out, or raise it")
        run.logger.warning("%s", sentence)
    return examples
