"""`forge status` in a terminal of its own, while the run that it shows goes on."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forge_core import artifacts
from forge_core.artifacts import Ref
from forge_core.jobs import StageJob
from forge_core.plan import Plan
from forge_core.runs import write_run
from tests.pipeline import steps, tiny_config

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
SUMMARIES: dict[str, dict[str, float | int]] = {
    "rollout": {"completion/length/mean": 123.4, "completion/truncated_fraction": 1.0, "logprob_gap/mean": 0.0123},
    "score": {"reward/mean": 0.512, "groups/informative": 512},
    "update": {"entropy/mean": 1.234, "loss/clip_fraction": 0.123, "kl/reference": 0.1234, "grad_norm/total": 12.34},
    "evaluate": {f"eval/heldout/accuracy{end}": 0.5 for end in ("", "_low", "_high")}
    | {"eval/heldout/num_examples": 9},
}


def commit(job: StageJob) -> Ref:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "content").write_text(job.digest())
        return artifacts.commit(
            Path(name), job.output, kind=job.kind, job=job.as_json(), job_digest=job.digest(), inputs=job.inputs,
            summary=SUMMARIES.get(job.stage, {}), software={}, timings={job.stage: 1.0},
        ).ref  # fmt: skip


class Terminal:
    """What a process writes to a terminal of so many columns and 24 lines."""

    def __init__(self, leader: int) -> None:
        self._leader, self.text = leader, ""

    def read_until(self, wanted: str) -> None:
        """Read on until this was shown after what was read before; the test's own time limit ends the wait."""
        begin = len(self.text)
        while wanted not in ESCAPES.sub("", self.text[begin:]):
            self.text += os.read(self._leader, 1 << 16).decode()

    def read_all(self) -> str:
        """Everything that was shown in the end, without the escapes that move the cursor."""
        try:
            while data := os.read(self._leader, 1 << 16):
                self.text += data.decode()
        except OSError:  # Linux says EIO when the other end is closed
            pass
        return ESCAPES.sub("", self.text)


@contextmanager
def following(run_uri: str, columns: int) -> Iterator[Terminal]:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-m", "deployments.cli", "status", run_uri, "--follow", "--every", "0.05"]
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env=env | {"TERM": "xterm"}, start_new_session=True
    )
    os.close(follower)
    try:
        yield Terminal(leader)
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)


@pytest.mark.parametrize(
    ("columns", "head"),
    [
        (80, "  reward length  trunc groups entropy  clip     KL    gap  grad   s"),
        (120, "iteration  reward  length  truncated    learn from  entropy  clipped     reference"),
    ],
)
def test_a_run_is_followed_to_its_end_and_fits_the_terminal(tmp_path: Path, columns: int, head: str):
    config = tiny_config(str(tmp_path), name="followed")
    plan = Plan(config, "run")
    write_run(plan.run_uri, "run", config)
    with following(plan.run_uri, columns) as terminal:

        def run(job: StageJob) -> Ref:
            ref = commit(job)
            if job.output.endswith(("policies/v0002", "policies/v0003", "policies/v0004")):
                terminal.read_until(f"{int(job.output[-1]) - 1} of 3 iterations")
            return ref

        steps(plan, run)
        [evaluation] = config.evals
        policy = Ref(kind="policy", uri=f"{plan.run_uri}/policies/v0004", digest=_digest(plan))
        commit(plan.evaluate(policy, commit(plan.dataset(evaluation.dataset)), evaluation))
        shown = terminal.read_all()
    last = shown[shown.rindex("followed") :]
    assert "3 of 3 iterations" in last
    assert "v0004   heldout" in last
    lines = [line.rstrip() for line in last.splitlines()]
    assert max(map(len, lines)) <= columns
    assert "…" not in last
    assert any(head in line for line in lines), last
    rows = [line for line in last.splitlines() if "0.512" in line]
    assert len(rows) == 3
    assert all("123.4" in row and "100.0%" in row and "0.0123" in row and "12.34" in row for row in rows)


def _digest(plan: Plan) -> str:
    manifest = artifacts.read_manifest(f"{plan.run_uri}/policies/v0004")
    assert manifest is not None
    return manifest.digest
