"""Rows of files in every format, and the examples made of them."""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from forge_core import storage
from forge_core.datasets import file, gsm8k, hub, math, mixture
from forge_core.tables import BATCH_ROWS, pick, read_rows

ROWS = [
    {"question": f"What is {n}+{n}?", "answer": str(2 * n), "extra": {"level": n % 3, "steps": ["a", "b"]}}
    for n in range(40)
]


def write(directory: Path, kind: str) -> str:
    path = directory / f"rows.{kind}"
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    match kind:
        case "jsonl":
            path.write_text(lines)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(lines.encode()))
        case "parquet":
            pq.write_table(pa.Table.from_pylist(ROWS), path)
        case "arrow":
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, pa.Table.from_pylist(ROWS).schema) as writer:
                writer.write(pa.Table.from_pylist(ROWS))
        case "csv":
            with path.open("w", newline="") as opened:
                writer = csv.DictWriter(opened, ["question", "answer"], extrasaction="ignore")
                writer.writeheader()
                writer.writerows(ROWS)
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "arrow", "csv"])
def test_every_format_gives_the_same_examples(tmp_path: Path, kind: str):
    examples = list(file(path=write(tmp_path, kind)))
    assert [example.answer for example in examples] == [row["answer"] for row in ROWS]
    assert examples == list(file(path=write(tmp_path, "jsonl")))


def test_what_the_datasets_library_has_stored_is_read_as_a_file_and_as_a_directory(tmp_path: Path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "stored")
    [stored] = (tmp_path / "stored").glob("*.arrow")
    expected = list(file(path=write(tmp_path, "jsonl")))
    assert list(file(path=str(stored))) == expected
    (tmp_path / "layout").mkdir()
    write(tmp_path / "layout", "parquet")
    assert list(hub(name=str(tmp_path / "layout"))) == expected


def test_files_of_a_bucket_are_read_in_the_order_of_their_names(moto_s3: str):
    for name, rows in (("b", ROWS[20:]), ("a", ROWS[:20])):
        storage.write_atomic(f"{moto_s3}/data/{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    examples = list(file(path=f"{moto_s3}/data/*.jsonl"))
    assert [example.answer for example in examples] == [row["answer"] for row in ROWS]


def test_a_parquet_file_is_read_a_batch_at_a_time(tmp_path: Path):
    path = tmp_path / "large.parquet"
    with pq.ParquetWriter(path, pa.schema({"question": pa.string()})) as writer:
        for _ in range(40):
            writer.write_table(pa.table({"question": ["x" * 5000] * BATCH_ROWS}))
    before = pa.total_allocated_bytes()
    rows = read_rows(str(path))
    largest = 0
    for _ in range(20 * BATCH_ROWS):
        next(rows)
        largest = max(largest, pa.total_allocated_bytes() - before)
    assert largest < 40 * BATCH_ROWS * 5000 / 4  # of 200 MB in all


def test_fields_may_lie_inside_of_others_and_chats_may_be_whole(tmp_path: Path):
    path = write(tmp_path, "parquet")
    fields = {"answer": "extra.steps.1", "metadata": ["extra.level"], "response": "answer"}
    example = list(file(path=path, fields=fields, system="Be brief."))[4]
    assert example.answer == "b"
    assert example.metadata == {"extra.level": 1}
    assert [turn.role for turn in example.messages] == ["system", "user", "assistant"]

    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"chat": turns}) + "\n")
    [chat] = file(path=str(tmp_path / "chats.jsonl"), fields={"messages": "chat", "answer": None})
    assert chat.conversation == turns
    assert chat.answer is None


def test_splits_are_disjoint_by_prompt_whatever_the_row(tmp_path: Path):
    rows = ROWS + [row | {"answer": "other"} for row in ROWS]
    path = tmp_path / "twice.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, test = (list(file(path=str(path), split=split, test_fraction=0.3)) for split in ("train", "test"))
    assert len(train) + len(test) == 80
    prompts = [{example.messages[0].content for example in part} for part in (train, test)]
    assert not prompts[0] & prompts[1]
    assert all(prompts)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            '{"question": "x", "answer": "1"}\n{"question": ""}\n',
            r"a\.jsonl:2 has no 'question'; its",
        ),
        ("a.jsonl", '{"question": "x", "answer": "1"}\nnot json\n', r"a\.jsonl:2 is not JSON"),
        ("a.jsonl", "[1]\n", r"a\.jsonl:1 is list; a row must be an object"),
        ("a.txt", "x", r"a\.txt has no known ending .* set format"),
    ],
)
def test_what_cannot_be_read_is_named_by_file_and_row(tmp_path: Path, name: str, content: str, message: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        list(file(path=str(tmp_path / name)))


def test_a_pattern_that_matches_nothing_and_a_field_that_does_not_exist_are_errors(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"\*\.jsonl matches no file"):
        list(read_rows(str(tmp_path / "*.jsonl")))
    with pytest.raises(ValueError, match=r"questoin\s+Extra inputs"):
        list(file(path="x", fields={"questoin": "q"}))
    with pytest.raises(ValueError, match=r"here has no 'a\.9'; its fields are a"):
        pick({"a": [1]}, "a.9", "here")


def test_gsm8k_keeps_the_worked_solution_for_sft_and_the_number_as_answer(tmp_path: Path):
    worked = "48/2 = <<48/2=24>>24\n48+24 = 72\n#### 72"
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "How many?", "answer": worked}) + "\n")
    [example] = gsm8k(path=str(tmp_path / "train.jsonl"))
    assert example.answer == "72"
    assert example.conversation[-1] == {"role": "assistant", "content": worked}


def test_math_has_the_boxed_answer_the_worked_solution_and_the_level(tmp_path: Path):
    row = {"problem": "Half of 1?", "level": "Level 3", "type": "Algebra", "solution": "It is $\\boxed{\\frac{1}{2}}$."}
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(row) + "\n")
    [example] = math(path=str(path))
    assert (example.answer, example.metadata) == ("\\frac{1}{2}", {"difficulty": 3.0})
    assert example.conversation[-1]["content"] == row["solution"]
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    assert [one.answer for one in math(name=str(tmp_path), part="train")] == ["\\frac{1}{2}"]  # a mirror of the hub
    path.write_text(json.dumps(row | {"solution": "one half"}) + "\n")
    with pytest.raises(ValueError, match=r"of math has no closed \\boxed\{\} in its solution"):
        list(math(path=str(path)))


def test_a_difficulty_is_a_number_or_a_text_with_one(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    rows = [{"question": "a", "answer": "1", "level": level} for level in (2, 0.5, "Level 4", "hard")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream = file(path=str(path), fields={"difficulty": "level"})
    assert [next(stream).metadata["difficulty"] for _ in range(3)] == [2.0, 0.5, 4.0]
    with pytest.raises(ValueError, match=r"rows.jsonl:4 has the difficulty 'hard', which holds no number"):
        next(stream)


def test_a_mixture_takes_its_sources_in_proportion_and_repeats_nothing(tmp_path: Path):
    sources = [
        {"fn": "file", "kwargs": {"path": write(tmp_path, "jsonl")}, "weight": 1},
        {"fn": "arithmetic", "kwargs": {"max_number": 30}, "weight": 3},
    ]
    examples = list(mixture(sources=sources, size=100))
    counts = Counter(example.metadata["source"] for example in examples)
    assert counts.total() == 100
    assert 12 <= counts["file"] <= 38  # 25 expected, standard deviation 4.3
    assert len({example.id for example in examples}) == 100
    assert examples == list(mixture(sources=sources, size=100))
    assert examples != list(mixture(sources=sources, size=100, seed=1))
    with pytest.raises(ValueError, match=r"source 0 \(file\) has 40 examples and .* are wanted; lower size"):
        list(mixture(sources=sources, size=400))
