"""A trainer on several nodes: a stand-in for srun starts the real torchrun of every node on this machine."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from forge_core.config import TrainerConfig
from forge_core.jobs import StageJob
from forge_core.plan import Plan
from forge_core.stages.nodes import SCRATCH, run_on_nodes
from forge_core.stages.process import StageError
from tasks.processes import run_alone, stage_processes
from tests.pipeline import COLD, in_processes, tiny_config, weights_sha256

# As much of srun as is used: so many tasks of one command, all ended when one fails or when it is told to end.
SRUN = f"""#!{sys.executable}
import signal, subprocess, sys, time
words = sys.argv[1:]
options = dict(word.lstrip("-").partition("=")[::2] for word in words if word.startswith("--"))
command = words[next(place for place, word in enumerate(words) if not word.startswith("--")):]
tasks = [subprocess.Popen(command) for _ in range(int(options["ntasks"]))]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
while any(task.poll() is None for task in tasks):
    if any(task.poll() for task in tasks):
        [task.kill() for task in tasks if task.poll() is None]
    time.sleep(0.1)
sys.exit(max(abs(task.returncode) for task in tasks))
"""


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that the nodes share."""
    (tmp_path / "bin").mkdir()
    srun = tmp_path / "bin" / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv(SCRATCH, str(tmp_path / "shared"))
    return tmp_path / "shared"


def sft_job(root: Path, num_ranks: int = 2) -> StageJob:
    config = tiny_config(str(root), trainer=TrainerConfig(row_tokens=128, num_ranks=num_ranks), keep_warm=COLD)
    plan = Plan(config, "run")
    assert plan.sft_config is not None
    with stage_processes(config, logging.getLogger("nodes")) as processes:
        run = in_processes(processes)
        return plan.sft(run(plan.start()), run(plan.dataset(plan.sft_config.dataset)))


def test_ranks_that_cannot_be_dealt_out_are_refused(two_nodes: Path):
    job = Plan(tiny_config("memory://x"), "run").start()
    with pytest.raises(ValueError, match=r"num_ranks is 3, which cannot be dealt out to 2 nodes"):
        run_on_nodes(job, num_ranks=3, num_nodes=2, time_limit_seconds=1, on_line=print)


def test_nodes_without_a_shared_directory_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(SCRATCH, raising=False)
    job = Plan(tiny_config("memory://x"), "run").start()
    with pytest.raises(ValueError, match=rf"{SCRATCH} is not set; 2 nodes"):
        run_on_nodes(job, num_ranks=2, num_nodes=2, time_limit_seconds=1, on_line=print)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_nodes_of_one_rank_publish_the_bits_of_one_node_of_two(two_nodes: Path, tmp_path: Path):
    logger = logging.getLogger("nodes")
    spread = run_alone(sft_job(tmp_path / "a"), 300, logger)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SLURM_JOB_NUM_NODES")
        together = run_alone(sft_job(tmp_path / "b"), 300, logger)
    assert weights_sha256([spread]) == weights_sha256([together])
    assert list(two_nodes.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_failure_on_the_nodes_has_its_cause_and_a_killed_owner_takes_them_along(two_nodes: Path, tmp_path: Path):
    job = sft_job(tmp_path)
    damaged = job.model_copy(update={"policy": job.inputs["policy"].model_copy(update={"digest": "0" * 64})})
    with pytest.raises(StageError, match="the job needs 0000") as caught:
        run_alone(damaged, 300, logging.getLogger("nodes"))
    assert caught.value.cause == "ArtifactError"

    (tmp_path / "job.json").write_text(job.model_dump_json())
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path / "job.json")])
    deadline = time.monotonic() + 120
    while len(ranks := _ranks(two_nodes)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    assert (len(gone), alive) == (len(ranks), [])


OWNER = """
import json, logging, sys
from pathlib import Path
from forge_core.jobs import parse_job
from tasks.processes import run_alone
run_alone(parse_job(json.loads(Path(sys.argv[1]).read_text())), 300, logging.getLogger("owner"))
"""


def _ranks(shared: Path) -> list[psutil.Process]:
    """The processes that work in the shared directory, torchrun apart."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        is_stage = "forge_core.stages" in words and "torch.distributed.run" not in words
        if is_stage and any(str(shared) in word for word in words):
            found.append(process)
    return found
