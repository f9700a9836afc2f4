"""A stage process.

    python -m forge_core.stages job.json                       run one job from its file, print its manifest's URI
    python -m forge_core.stages --connect SOCKET --scratch DIR  take jobs from an owner until its channel closes

With several ranks the same command runs under torchrun; a job file then needs a scratch directory that all ranks see.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import queue
import shutil
import socket
import struct
import sys
import tempfile
import threading
import traceback
from pathlib import Path

from forge_core.artifacts import Manifest
from forge_core.jobs import Job, parse_job
from forge_core.stages.workspace import Workspace, committed
from forge_core.storage_errors import StorageUnavailableError

logger = logging.getLogger("forge_core.stages")


def run_job(job: Job, workspace: Workspace) -> Manifest | None:
    """The job's committed output: found when it is there already, else made now (None on ranks other than 0)."""
    workspace.begin_job(job)
    found = committed(job)
    if found is not None:
        logger.info("%s is already committed", job.output)
        return found
    logger.info("%s -> %s", job.stage, job.output)
    workspace.injection.record("attempt")
    workspace.injection.reach("begin")
    return importlib.import_module(f"forge_core.stages.{job.stage}").run(job, workspace)


def serve(channel: socket.socket, workspace: Workspace, preload: list[str]) -> None:
    """Answer jobs until the channel closes. A closed channel ends the process at once, whatever it is doing."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        try:
            with channel.makefile("r") as reader:
                for line in reader:
                    lines.put(line)
        finally:  # an owner that is killed before it has listened resets the channel instead of closing it
            shutil.rmtree(workspace.scratch, ignore_errors=True)
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    _send(channel, {"rank": workspace.rank})
    for name in preload:
        importlib.import_module(f"forge_core.stages.{name}")
    while True:
        job = parse_job(json.loads(lines.get()))
        try:
            manifest = run_job(job, workspace)
            _send(channel, {"manifest": manifest.model_dump(mode="json") if manifest else None})
            workspace.injection.reach("answered")
            workspace.finish_job()
            _send(channel, {"idle": True})
        except Exception as error:
            logger.error("%s failed\n%s", job.stage, traceback.format_exc())
            _send(channel, {"error": {"type": error_type(error), "message": str(error)}})
            raise SystemExit(1) from error


def error_type(error: BaseException) -> str:
    """The name that the owner decides by: OutOfMemory for every way to run out of it, else the exception's own.

    torch raises a plain RuntimeError on a CPU.
    """
    text = str(error).lower()
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
        return "OutOfMemory"
    if isinstance(error, StorageUnavailableError | ConnectionError | TimeoutError):
        return "StorageUnavailable"
    return type(error).__name__


def _peer_pid(channel: socket.socket) -> int:
    pid, _uid, _gid = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid


def _send(channel: socket.socket, message: dict) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def main() -> None:
    """Command line of a stage process."""
    parser = argparse.ArgumentParser(prog="python -m forge_core.stages", description=__doc__)
    parser.add_argument("job", nargs="?", type=Path, help="a job file (JSON)")
    parser.add_argument("--connect", help="path of the owner's Unix socket")
    parser.add_argument("--scratch", type=Path, help="directory for temporary files, owned by this process")
    parser.add_argument("--answer", type=Path, help="where the manifest of a job file, or its failure, is written")
    parser.add_argument("--preload", nargs="*", default=[], help="stages to import before the first job")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    # Both warn at import about what no user can act on: CUDA extensions that a CPU lacks, a deprecation inside torchao.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if arguments.connect:
        channel = socket.socket(socket.AF_UNIX)
        channel.connect(arguments.connect)
        serve(channel, Workspace(arguments.scratch, _peer_pid(channel)), arguments.preload)
    if arguments.job is None:
        parser.error("name a job file, or --connect")
    with tempfile.TemporaryDirectory(prefix="forge-") as own:
        run_file(arguments.job, Workspace(arguments.scratch or Path(own)), arguments.answer)


def run_file(path: Path, workspace: Workspace, answer: Path | None) -> None:
    """Run the job of a file; rank 0 says where its manifest is, and writes it or the failure to `answer`."""
    try:
        manifest = run_job(parse_job(json.loads(path.read_text())), workspace)
    except Exception as error:
        if answer is not None:
            # Of several ranks that fail the first one is the cause; the others lack a partner.
            with contextlib.suppress(FileExistsError), answer.open("x") as file:
                json.dump({"error": {"type": error_type(error), "message": str(error)}}, file)
        raise
    workspace.finish_job()
    if manifest is not None:
        sys.stdout.write(f"{manifest.uri}/manifest.json\n")
        if answer is not None:
            answer.write_text(json.dumps({"manifest": manifest.model_dump(mode="json")}))


if __name__ == "__main__":
    main()
