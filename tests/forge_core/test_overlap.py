"""Held-out problems in the training data: which are found, and which are not mistaken for others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_core.config import EvalConfig
from forge_core.data_config import DatasetConfig
from forge_core.overlap import Found, Problem, find_overlap
from forge_core.plan import Plan
from forge_core.side_jobs import overlap_job
from forge_core.stages.__main__ import run_job
from forge_core.stages.workspace import Workspace
from tests.pipeline import tiny_config

LONG = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."


def found(training: list[str], held_out: list[str], num_words: int = 13) -> list[Found]:
    """Overlap of prompts named t0, t1, ... and h0, h1, ... ."""
    problems = [
        [Problem(f"{side}{n}", text) for n, text in enumerate(texts)]
        for side, texts in zip("th", (training, held_out), strict=True)
    ]
    return find_overlap(problems[0], problems[1], num_words=num_words)


def test_a_prompt_is_the_same_whatever_its_case_spaces_and_characters():
    assert found(["What is\n \N{FULLWIDTH DIGIT TWO}+2 ?"], ["what  is 2+2?"]) == [Found("h0", "t0", "exact")]


@pytest.mark.parametrize("other", ["3-4=", "34=", "3+4", "3+40="])
def test_a_sign_or_a_digit_makes_another_problem(other: str):
    assert found([other], ["3+4="]) == []


def test_a_prompt_with_thirteen_words_in_a_row_of_another_is_near_and_one_with_twelve_is_not():
    words = LONG.split()
    assert found([" ".join(["so", *words[:13]])], [LONG]) == [Found("h0", "t0", "near")]
    assert found([" ".join(["so", *words[:12]])], [LONG]) == []
    assert found([LONG.replace(",", " ;").upper()], [LONG]) == [Found("h0", "t0", "near")]
    assert found([" ".join(words[:13])], [LONG], num_words=0) == []


def test_words_that_several_held_out_problems_share_tell_none_of_them_apart():
    instruction = "Use all of the numbers below once each, and the four operations, to make the target."
    held_out = [f"{instruction} Numbers 1 2 3", f"{instruction} Numbers 4 5 6"]
    assert found([f"{instruction} Numbers 7 8 9", held_out[1]], held_out) == [Found("h1", "t1", "exact")]


def test_a_held_out_problem_that_stands_there_twice_is_found_twice():
    assert [one.held_out_id for one in found([LONG], [LONG, LONG])] == ["h0", "h1"]
    assert [one.how for one in found([f"{LONG} Why?"], [LONG, LONG])] == ["near", "near"]


def test_what_counts_is_what_the_user_says():
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2="},
        {"role": "assistant", "content": "4"},
    ]
    assert Problem.of({"id": "e", "messages": turns}) == Problem("e", "1+1=\n2\n2+2=")


def test_the_stage_counts_only_what_is_evaluated_and_names_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def dataset(name: str, *questions: str) -> DatasetConfig:
        rows = "".join(json.dumps({"question": text, "answer": "1"}) + "\n" for text in questions)
        (tmp_path / f"{name}.jsonl").write_text(rows)
        return DatasetConfig(fn="file", kwargs={"path": str(tmp_path / f"{name}.jsonl")})

    training, held_out = dataset("train", "a", "B", "c", "z\u2028z"), dataset("test", "x", "b", LONG, "c")
    evals = (EvalConfig(name="first", dataset=held_out, num_examples=3), EvalConfig(name="all", dataset=held_out))
    plan = Plan(tiny_config(str(tmp_path / "store"), evals=evals), "run")
    workspace = Workspace(tmp_path)
    refs = [run_job(plan.dataset(one), workspace).ref for one in (training, held_out, held_out)]  # type: ignore
    report = run_job(overlap_job(plan, refs[0], refs[1:]), workspace)
    assert report is not None
    assert report.summary == {
        "overlap/first/exact": 1,
        "overlap/first/near": 0,
        "overlap/first/fraction": pytest.approx(1 / 3),
        "overlap/all/exact": 2,
        "overlap/all/near": 0,
        "overlap/all/fraction": pytest.approx(1 / 2),
    }
    _, directory = workspace.fetch(report.ref)
    rows = [json.loads(line) for line in (directory / "overlap.jsonl").read_text().splitlines()]
    assert [row["evaluation"] for row in rows] == ["first", "all", "all"]
    assert rows[0]["held_out_id"].startswith("2-")
    assert rows[0]["training_id"].startswith("2-")
    assert "1 of 3 problems of the evaluation first are in " in caplog.text
    # Another evaluation is another report, and no conflict with the one there is.
    fewer = overlap_job(Plan(tiny_config(str(tmp_path / "store"), evals=evals[:1]), "run"), refs[0], refs[1:2])
    assert run_job(fewer, workspace) is not None
