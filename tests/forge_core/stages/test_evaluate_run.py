"""An evaluation by a real engine: reproducible, with its own sampling, every problem once."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from forge_core.artifacts import Manifest, resolve
from forge_core.config import DatasetConfig, GeneratorConfig
from forge_core.eval_config import EvalConfig
from forge_core.evaluations import EvaluationReport, compare, setting_differences
from forge_core.manifests import file_reader
from forge_core.plan import Plan
from tasks.processes import stage_processes
from tests.pipeline import in_processes, tiny_config

pytestmark = pytest.mark.slow

# Ten problems, four at once; the last four have the same prompt.
QUESTIONS = [*(f"{number}+1=" for number in range(2, 8)), *["1+1="] * 4]
NUM_AT_ONCE = 4


def rows(evaluation: Manifest) -> list[dict]:
    return [json.loads(line) for line in file_reader(evaluation, "samples.jsonl")().splitlines()]


def texts(evaluation: Manifest) -> list[list[str]]:
    return [[sample["completion"] for sample in row["samples"]] for row in rows(evaluation)]


def test_an_evaluation_is_reproducible_and_has_its_own_sampling(tmp_path: Path):
    lines = [json.dumps({"question": text, "answer": "2", "difficulty": len(text)}) for text in QUESTIONS]
    (tmp_path / "problems.jsonl").write_text("\n".join(lines))
    kwargs = {"path": str(tmp_path / "problems.jsonl"), "fields": {"metadata": ["difficulty"]}}
    long = EvalConfig(dataset=DatasetConfig(fn="file", kwargs=kwargs), num_examples=10, max_tokens=9, pass_k=4)
    short = long.model_copy(update={"name": "short", "max_tokens": 2, "pass_k": 2})
    config = tiny_config(
        str(tmp_path / "store"),
        evals=(long, short),
        generator=GeneratorConfig(max_num_seqs=NUM_AT_ONCE, max_model_len=64),
    )
    with stage_processes(config, logging.getLogger("evaluate")) as processes:
        run, plan = in_processes(processes), Plan(config, "a")
        policy, problems = run(plan.start()), run(plan.dataset(long.dataset))
        made = {one.name: resolve(run(plan.evaluate(policy, problems, one))) for one in config.evals}
        again = resolve(run(Plan(config, "b").evaluate(policy, problems, long)))
        reseeded = Plan(config.model_copy(update={"seed": 1}), "c")
        other = resolve(run(reseeded.evaluate(policy, problems, long)))

    assert made["heldout"].digest == again.digest
    assert texts(other) != texts(again)
    assert [row["completion"] for row in rows(other)] == [row["completion"] for row in rows(again)]  # greedy

    assert [len({row["id"] for row in rows(one)}) for one in made.values()] == [10, 10]
    assert made["heldout"].summary["eval/heldout/num_examples"] == 10
    assert made["short"].summary["eval/short/num_examples"] == 10
    assert made["heldout"].summary["eval/heldout/difficulty/4/num_examples"] == 10
    assert len({tuple(group) for group in texts(again)[6:]}) > 1, "the same prompt in four places has the same samples"

    assert config.grpo.sampling.max_tokens == 4  # of rollouts
    lengths = {name: {s["num_tokens"] for row in rows(one) for s in row["samples"]} for name, one in made.items()}
    assert max(lengths["heldout"]) == 9
    assert max(lengths["short"]) == 2
    report = EvaluationReport.model_validate_json(file_reader(made["short"], "report.json")())
    assert (report.sampled.max_tokens, report.num_samples, report.seed) == (2, 2, 0)
    assert report.metrics["accuracy"] == made["short"].summary["eval/short/accuracy"]

    assert compare(again, other)["accuracy"].difference == 0
    assert set(compare(again, other)) == {"accuracy", "pass_at_1", "majority"}
    assert [text.partition(" ")[0] for text in setting_differences(made["heldout"], made["short"])] == [
        "evaluation.max_tokens",
        "evaluation.name",
        "evaluation.pass_k",
    ]
