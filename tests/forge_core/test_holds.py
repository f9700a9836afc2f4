"""Holds: what is being read is not pruned; a reader that was killed does not pin it for ever."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import time
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from forge_core import artifacts, listing, storage
from forge_core.artifacts import ArtifactError, Ref
from forge_core.holds import Hold, held, hold, keep
from forge_core.operation import RetentionConfig
from forge_core.retention import prune

REF = Ref(kind="policy", uri="memory://nowhere/run/policies/v0003", digest="d3")


def read_hold(root: str, digest: str) -> Hold:
    # A renewal writes beside it first.
    [name] = [name for name in storage.list_names(f"{root}/holds/{digest}") if not name.startswith(".")]
    return Hold.model_validate_json(storage.read_bytes(f"{root}/holds/{digest}/{name}"))


def test_an_artifact_is_held_while_the_block_runs(root: str):
    assert held(root) == set()
    with hold(root, REF, "evaluation"):
        assert held(root) == {"d3"}
        content = read_hold(root, "d3")
        assert content.ref == REF
        assert content.reason == "evaluation"
        assert content.holder.endswith(f":{os.getpid()}")
        assert content.expires_at == content.created_at + timedelta(hours=1)
    assert held(root) == set()
    assert listing.list_objects(f"{root}/holds") == []


def test_a_hold_ends_with_a_block_that_fails(root: str):
    with pytest.raises(KeyError), hold(root, REF, "evaluation"):
        raise KeyError
    assert held(root) == set()


def test_two_holds_of_one_artifact_end_one_by_one(root: str):
    with hold(root, REF, "first"):
        with hold(root, REF, "second"):
            assert held(root) == {"d3"}
        assert held(root) == {"d3"}
    assert held(root) == set()


def test_what_is_kept_stays_held_until_the_object_is_deleted(root: str):
    uri = keep(root, REF, "its update was not finite")
    assert held(root) == {"d3"}
    assert read_hold(root, "d3").expires_at is None
    listing.delete_object(uri)
    assert held(root) == set()


def test_a_pruned_artifact_can_be_neither_held_nor_kept(root: str):
    ref = Ref(kind="policy", uri=f"{root}/run/policies/v0003", digest="d3")
    storage.create_exclusive(f"{ref.uri}/pruned.json", b"{}")
    with pytest.raises(ArtifactError, match="retention pruned"):
        hold(root, ref, "evaluation").__enter__()
    with pytest.raises(ArtifactError, match="retention pruned"):
        keep(root, ref, "inspection")
    assert held(root) == set()


def test_an_expired_hold_counts_as_absent(root: str):
    now = datetime.now(UTC)
    for digest, seconds in (("past", -1), ("future", 60)):
        content = Hold(
            ref=REF.model_copy(update={"digest": digest}),
            holder="host:1",
            reason="test",
            created_at=now - timedelta(hours=1),
            expires_at=now + timedelta(seconds=seconds),
        )
        storage.create_exclusive(f"{root}/holds/{digest}/0.json", content.model_dump_json().encode())
    assert held(root) == {"future"}


def test_an_unreadable_hold_counts_as_held(root: str, caplog: pytest.LogCaptureFixture):
    storage.create_exclusive(f"{root}/holds/d3/0.json", b"{}")
    assert held(root) == {"d3"}
    assert "is no hold, the artifact counts as held" in caplog.text


def test_a_long_reader_renews_its_hold(tmp_path: Path):
    root = tmp_path.as_uri()
    with hold(root, REF, "evaluation", seconds=0.2):
        first = read_hold(root, "d3").expires_at
        while read_hold(root, "d3").expires_at == first:
            time.sleep(0.01)


def test_a_hold_that_cannot_be_renewed_says_so_and_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    root = tmp_path.as_uri()
    directory = tmp_path / "holds" / "d3"
    with hold(root, REF, "evaluation", seconds=0.2):
        while not directory.is_file():  # the renewal may come in between
            with contextlib.suppress(OSError):
                shutil.rmtree(directory)
                directory.write_text("in the way")
        while "cannot renew the hold" not in caplog.text:
            time.sleep(0.01)
        directory.unlink()
        while held(root) != {"d3"}:
            time.sleep(0.01)
    assert held(root) == set()


def _commit_policies(root: str, scratch: Path, count: int) -> list[Ref]:
    """A start policy and updates; nothing in them but their number."""
    refs = []
    for number in range(count):
        directory = scratch / f"source-{number}"
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_text(str(number))
        job = {"stage": "update" if number else "start", "number": number}
        manifest = artifacts.commit(
            directory,
            f"{root}/run/policies/v{number:04d}",
            kind="policy",
            job=job,
            job_digest=artifacts.sha256_json(job),
            inputs={},
            summary={},
            software={},
            timings={},
        )
        refs.append(manifest.ref)
    return refs


def _commit_accuracy(root: str, scratch: Path, number: int, accuracy: float) -> None:
    directory = scratch / f"eval-{number}"
    directory.mkdir(parents=True)
    (directory / "samples.jsonl").write_text("")
    artifacts.commit(
        directory,
        f"{root}/run/evals/v{number:04d}/heldout",
        kind="eval",
        job={"stage": "evaluate"},
        job_digest=str(number),
        inputs={},
        summary={"eval/heldout/accuracy": accuracy},
        software={},
        timings={},
    )


def _read_for_ever(root: str, ref: Ref, seconds: float, scratch: str, channel: Connection) -> None:
    with hold(root, ref, "a reader in another process", seconds):
        _, directory = artifacts.fetch(ref, Path(scratch))
        channel.send("reading")
        channel.recv()  # the parent asks for the bytes once it has pruned
        channel.send((directory / "model.safetensors").read_text())
        channel.recv()


@pytest.fixture
def kept_two_and_best(tmp_path: Path) -> tuple[str, list[Ref], RetentionConfig]:
    """Versions 0 (start) to 6, of which the settings keep 0, 5, 6 and the best one, 2."""
    root = (tmp_path / "store").as_uri()
    refs = _commit_policies(root, tmp_path, 7)
    for number, accuracy in ((1, 0.1), (2, 0.9), (3, 0.3), (4, 0.2)):
        _commit_accuracy(root, tmp_path, number, accuracy)
    return root, refs, RetentionConfig(keep_last=2, best_metric="eval/heldout/accuracy")


def test_retention_spares_the_best_and_what_another_process_reads(
    kept_two_and_best: tuple[str, list[Ref], RetentionConfig], tmp_path: Path
):
    root, refs, retention = kept_two_and_best
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=_read_for_ever, args=(root, refs[3], 60.0, str(tmp_path), theirs), daemon=True)
    reader.start()
    assert ours.recv() == "reading"

    report = prune(f"{root}/run", retention)
    assert sorted(report.deleted) == ["policies/v0001", "policies/v0004"]
    assert report.kept["policies/v0002"] == "best eval/heldout/accuracy: 0.9"
    assert report.kept["policies/v0003"] == "held"
    ours.send("read now")
    assert ours.recv() == "3"

    ours.send("end")
    reader.join()
    assert sorted(prune(f"{root}/run", retention).deleted) == ["policies/v0003"]


def test_a_killed_reader_lets_go_when_its_hold_expires(
    kept_two_and_best: tuple[str, list[Ref], RetentionConfig], tmp_path: Path
):
    root, refs, retention = kept_two_and_best
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=_read_for_ever, args=(root, refs[3], 1.0, str(tmp_path), theirs), daemon=True)
    reader.start()
    assert ours.recv() == "reading"
    assert reader.pid is not None
    os.kill(reader.pid, signal.SIGKILL)
    reader.join()

    expires_at = read_hold(root, refs[3].digest).expires_at
    assert expires_at is not None
    while (left := (expires_at - datetime.now(UTC)).total_seconds()) > 0:
        time.sleep(left)
    assert "policies/v0003" in prune(f"{root}/run", retention).deleted
