"""Datasets, and the order their examples are taken in."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from forge_core.datasets import arithmetic, countdown, file
from forge_core.datasets import reasoning_gym as gym_problems
from forge_core.examples import (
    Example,
    Message,
    difficulties,
    pick_examples,
    read_examples,
    take,
    write_examples,
)


def test_train_and_test_sums_are_disjoint_and_complete():
    train = {example.id for example in arithmetic(split="train", max_number=19)}
    test = {example.id for example in arithmetic(split="test", max_number=19)}
    assert not train & test
    assert len(train | test) == 20 * 20


def test_a_held_out_sum_is_not_practised_the_other_way_round():
    train = {example.id for example in arithmetic(split="train", min_number=10, max_number=29)}
    swapped = {
        "{1}+{0}=".format(*example.id[:-1].split("+"))
        for example in arithmetic(split="test", min_number=10, max_number=29)
    }
    assert swapped
    assert not train & swapped


def test_an_epoch_visits_every_example_once():
    order = take(7, start=0, count=7, seed=0, digest="d")
    assert sorted(order) == list(range(7))


def test_windows_join_up_across_epochs_without_repeats():
    whole = take(7, start=0, count=21, seed=0, digest="d")
    windows = [take(7, start=start, count=3, seed=0, digest="d") for start in range(0, 21, 3)]
    assert list(itertools.chain.from_iterable(windows)) == whole
    assert sorted(whole[7:14]) == list(range(7))
    assert whole[:7] != whole[7:14]


def test_the_order_depends_on_seed_and_dataset():
    orders = {tuple(take(50, start=0, count=50, seed=seed, digest=digest)) for seed in (0, 1) for digest in "ab"}
    assert len(orders) == 4


def test_easy_problems_come_first_in_every_epoch_and_ties_are_shuffled():
    levels = [3.0, 1.0, 1.0, 2.0, 1.0, 3.0]
    whole = take(6, start=0, count=12, seed=0, digest="d", difficulties=levels)
    assert [levels[index] for index in whole] == [1, 1, 1, 2, 3, 3] * 2
    assert sorted(whole[:6]) == list(range(6))
    windows = [take(6, start=start, count=4, seed=0, digest="d", difficulties=levels) for start in (0, 4, 8)]
    assert list(itertools.chain.from_iterable(windows)) == whole
    orders = {tuple(take(6, start=0, count=6, seed=seed, digest="d", difficulties=levels)) for seed in range(9)}
    assert len(orders) > 1


def test_the_difficulty_of_every_example_is_a_number_or_the_one_without_is_named(tmp_path: Path):
    turns = (Message(role="user", content="1+1="),)
    examples = [Example(id=str(level), messages=turns, metadata={"difficulty": level}) for level in (2, 0.5)]
    write_examples(examples, tmp_path / "x.jsonl")
    assert difficulties(tmp_path / "x.jsonl") == [2.0, 0.5]
    write_examples([*examples, Example(id="none", messages=turns)], tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match=r"x.jsonl:3 has the metadata.difficulty None, and order is easy_first"):
        difficulties(tmp_path / "x.jsonl")


def test_examples_may_hold_every_character_that_unicode_calls_a_line_break(tmp_path: Path):
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\r\nh"
    examples = [Example(id=f"{n}\u2028", messages=(Message(role="user", content=text),)) for n in range(3)]
    write_examples(examples, tmp_path / "x.jsonl")
    assert read_examples(tmp_path / "x.jsonl") == examples
    assert pick_examples(tmp_path / "x.jsonl", [2, 0, 2]) == [examples[2], examples[0], examples[2]]


def test_countdown_problems_are_those_of_reasoning_gym_and_any_right_expression_is_right():
    from forge_core.rewards.gym import reasoning_gym

    train, test = (list(countdown(size=5, split=split)) for split in ("train", "test"))
    assert not {example.messages for example in train} & {example.messages for example in test}
    assert train == list(countdown(size=5))
    right = train[0].answer or ""
    assert reasoning_gym(f"<answer>{right}</answer>", train[0]) == 1
    assert reasoning_gym(f"<answer>0+({right})</answer>", train[0]) < 1  # a number that is not given
    assert reasoning_gym("<answer>1+1</answer>", train[0]) < 1


def test_examples_survive_a_round_trip(tmp_path: Path):
    examples = list(gym_problems(task="chain_sum", size=3, min_terms=2, max_terms=2))
    assert write_examples(examples, tmp_path / "x.jsonl") == 3
    assert read_examples(tmp_path / "x.jsonl") == examples


def test_a_repeated_id_is_refused(tmp_path: Path):
    example = Example(id="a", messages=(Message(role="user", content="1+1="),))
    with pytest.raises(ValueError, match="'a' occurs twice"):
        write_examples([example, example], tmp_path / "x.jsonl")


def test_the_prompt_stops_before_the_answer_and_sft_needs_one():
    question, answer = Message(role="user", content="1+1="), Message(role="assistant", content="2")
    assert Example(id="a", messages=(question, answer)).prompt == [{"role": "user", "content": "1+1="}]
    with pytest.raises(ValueError, match="example a has no final assistant turn"):
        _ = Example(id="a", messages=(question,)).conversation


def test_a_row_without_an_answer_names_file_line_and_fields(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1+1", "answer": "2"}\n{"question": "2+2"}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl:2 has no 'answer'; its fields are question"):
        list(file(path=str(path)))


def test_train_and_test_problems_of_a_gym_task_come_from_different_streams():
    settings = {"task": "chain_sum", "size": 5, "min_digits": 4, "max_digits": 4}
    train = [example.messages for example in gym_problems(split="train", **settings)]
    test = [example.messages for example in gym_problems(split="test", **settings)]
    assert not set(train) & set(test)
