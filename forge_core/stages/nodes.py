"""One job on all nodes of a Slurm allocation: torchrun on each of them, started by srun, and all gone at the end.

Where a stage process of one machine takes jobs through a Unix socket, these ranks read theirs from a file that all
nodes see and end with it: nothing stays warm.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from forge_core.artifacts import Manifest
from forge_core.stage_job import StageJob
from forge_core.stages.process import ENVIRONMENT, EXIT_GRACE_SECONDS, StageError

SCRATCH = "FORGE_SHARED_SCRATCH"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def num_allocated() -> int:
    """Nodes of the Slurm job that this process belongs to; 1 outside of Slurm."""
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))


def run_on_nodes(
    job: StageJob, *, num_ranks: int, num_nodes: int, time_limit_seconds: float, on_line: Callable[[str], None]
) -> Manifest:
    """The job's output, made by `num_ranks` ranks in equal parts on `num_nodes` nodes. Raises StageError.

    Raises ValueError when the ranks cannot be dealt out, or when no directory is named that all nodes see.
    """
    if num_ranks % num_nodes:
        raise ValueError(
            f"trainer.num_ranks is {num_ranks}, which cannot be dealt out to {num_nodes} nodes; use a multiple of it"
        )
    if not os.environ.get(SCRATCH):
        raise ValueError(
            f"{SCRATCH} is not set; {num_nodes} nodes exchange checkpoints through files, so name a directory that all "
            "of them see in the environment of the pool"
        )
    home = Path(os.environ[SCRATCH]) / f"forge-{secrets.token_hex(8)}"
    (home / "scratch").mkdir(parents=True)
    try:
        (home / "job.json").write_text(json.dumps(job.as_json()))
        last_words = _run(_command(home, num_ranks // num_nodes, num_nodes), job, time_limit_seconds, on_line)
        if not (home / "answer.json").exists():
            raise StageError(job.stage, "died", f"{num_ranks} ranks on {num_nodes} nodes: {last_words}")
        answer = json.loads((home / "answer.json").read_text())
        if "error" in answer:
            raise StageError(job.stage, answer["error"]["type"], answer["error"]["message"])
        return Manifest.model_validate(answer["manifest"])
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _command(home: Path, ranks_per_node: int, num_nodes: int) -> list[str]:
    """One torchrun on each node; they find each other at a port of this one."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        endpoint = f"{socket.gethostname()}:{probe.getsockname()[1]}"
    launch = ["srun", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1", "--overlap"]
    launch += ["--kill-on-bad-exit=1", "--unbuffered", "--export=ALL"]
    if (num_cpus := os.environ.get("SLURM_CPUS_PER_TASK")) is not None:
        launch += [f"--cpus-per-task={num_cpus}"]  # a step does not inherit it, and would have one core on each node
    launch += [sys.executable, "-m", "torch.distributed.run", f"--nnodes={num_nodes}"]
    launch += [f"--nproc-per-node={ranks_per_node}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    launch += [f"--rdzv-id={home.name}", "-m", "forge_core.stages", str(home / "job.json")]
    return [*launch, "--scratch", str(home / "scratch"), "--answer", str(home / "answer.json")]


def _run(command: list[str], job: StageJob, time_limit_seconds: float, on_line: Callable[[str], None]) -> str:
    """Run until it ends, whatever its exit code; returns its last words. Raises StageError at the time limit."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=ENVIRONMENT | os.environ,
        start_new_session=True,
        preexec_fn=_end_with_owner,
    )
    last_lines: deque[str] = deque(maxlen=10)

    def forward() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            last_lines.append(line.rstrip())
            on_line(line.rstrip())

    reader = threading.Thread(target=forward, daemon=True)
    reader.start()
    try:
        code = process.wait(time_limit_seconds)
    except subprocess.TimeoutExpired:
        raise StageError(
            job.stage, "timeout", "the time limit of the stage has passed; raise it or make the job smaller"
        ) from None
    finally:
        for sent in (signal.SIGTERM, signal.SIGKILL):  # srun passes SIGTERM on to the other nodes
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_GRACE_SECONDS)
        reader.join(timeout=1)
    return f"exited with code {code}; last words: {' | '.join(last_lines) or 'none'}"


def _end_with_owner() -> None:
    # An owner that is killed cannot end the ranks; srun does when it is told to end.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
