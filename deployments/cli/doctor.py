"""`forge doctor`: is everything here that a run needs, and what is to be done when it is not."""

from __future__ import annotations

import importlib.metadata
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from pydantic import Field
from rich.console import Console
from rich.table import Table

from deployments.local_service import answers
from forge_core import listing, storage
from forge_core.settings import Settings

IMPORT_SECONDS = 180
MEMORY_GB = 8  # what the quickstart needs
DISK_GB = 10
_DEVICES = (
    "print(torch.cuda.device_count(), *{torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})"
)


class Check(Settings):
    """One thing looked at."""

    what: str
    outcome: Literal["ok", "warning", "failed"]
    found: str
    remedy: str = Field("", description="What to do; empty when there is nothing to do")


def examine(root: str) -> list[Check]:
    """Every check; the slow ones side by side."""
    slow: list[Callable[[], list[Check]]] = [
        lambda: [_import("torch", f"import torch; print(torch.__version__); {_DEVICES}")],
        lambda: [_import("vllm", "import vllm; print(vllm.__version__)")],
        lambda: [_import("torchtitan", "import torchtitan.models; print('imported')")],
        lambda: [_mlflow()],
    ]
    checks = [_python(), *_packages(), _memory(), *_disk(), _storage(root)]
    with ThreadPoolExecutor(len(slow)) as pool:
        waiting = [pool.submit(call) for call in slow]
        checks += _prefect()  # in this thread: Prefect's client belongs to the thread that made it
        return checks + [check for found in waiting for check in found.result()]


def exit_code(checks: list[Check]) -> int:
    """1 when a run cannot work, 0 otherwise."""
    return int(any(check.outcome == "failed" for check in checks))


def show(checks: list[Check], *, as_json: bool) -> None:
    """Print the checks as a table, or as JSON."""
    if as_json:
        sys.stdout.write(json.dumps([check.model_dump() for check in checks], indent=1) + "\n")
        return
    styles = {"ok": "green", "warning": "yellow", "failed": "bold red"}
    table = Table("", "what", "found", "what to do", box=None, padding=(0, 1))
    for check in checks:
        table.add_row(f"[{styles[check.outcome]}]{check.outcome}[/]", check.what, check.found, check.remedy)
    Console().print(table)


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    is_tested = sys.version_info[:2] == (3, 11)
    remedy = "" if is_tested else "the pinned packages are tested with 3.11: make setup PYTHON=python3.11"
    return Check(what="python", outcome="ok" if is_tested else "warning", found=version, remedy=remedy)


def _packages() -> Iterator[Check]:
    """The versions that pyproject.toml asks for; the stages' ones count where any of them is installed."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires("forge-flows") or []
    except importlib.metadata.PackageNotFoundError:
        yield Check(what="forge-flows", outcome="warning", found="not installed", remedy="make setup")
        return
    wrong, count = [], 0
    for requirement in map(Requirement, lines):
        in_stages = requirement.marker is not None and requirement.marker.evaluate({"extra": "stages"})
        if requirement.name == "forge-flows" or not (requirement.marker is None or in_stages):
            continue
        count += 1
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing ({requirement.specifier})")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, not {requirement.specifier}")
    yield Check(
        what="packages",
        outcome="failed" if wrong else "ok",
        found="; ".join(wrong) or f"{count} as asked for",
        remedy="make setup, or pip install the versions named" if wrong else "",
    )


def _import(name: str, program: str) -> Check:
    """An import in a process of its own: a library that crashes takes nothing with it."""
    remedy = "make setup on a CPU, pip install 'forge-flows[gpu]' on a GPU; only workers that run stages need it"
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return Check(what=name, outcome="failed", found=f"no import within {IMPORT_SECONDS} s", remedy=remedy)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
        return Check(what=name, outcome="failed", found=lines[-1], remedy=remedy)
    version, *rest = done.stdout.strip().splitlines()
    if name == "torch":
        number, _, names = rest[0].partition(" ")
        version += f", {number} GPUs {names}" if number != "0" else ", no GPU, CPU only"
    return Check(what=name, outcome="ok", found=version)


def _memory() -> Check:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) / 1e6
    is_enough = available >= MEMORY_GB
    return Check(
        what="memory",
        outcome="ok" if is_enough else "warning",
        found=f"{available:.1f} GB free of {int(fields['MemTotal'].split()[0]) / 1e6:.1f} GB, {os.cpu_count()} cores",
        remedy="" if is_enough else f"the quickstart wants {MEMORY_GB} GB: end other processes, or keep_warm: false",
    )


def _disk() -> Iterator[Check]:
    for place in dict.fromkeys((str(Path.cwd()), tempfile.gettempdir())):
        free = shutil.disk_usage(place).free / 1e9
        is_enough = free >= DISK_GB
        yield Check(
            what=f"disk {place}",
            outcome="ok" if is_enough else "failed" if free < 1 else "warning",
            found=f"{free:.1f} GB free",
            remedy="" if is_enough else "forge gc --delete, retention: {keep_last: 5}, or TMPDIR on a larger disk",
        )


def _storage(root: str) -> Check:
    """Create-only writes are honoured, and what is written comes back."""
    uri = f"{storage.absolute_uri(root)}/.probe-{secrets.token_hex(8)}"
    content = secrets.token_bytes(1024)
    try:
        storage.require_exclusive_create(root)
        storage.write_atomic(uri, content)
        is_same = storage.read_bytes(uri) == content
        listing.delete_object(uri)
    except (OSError, ValueError) as error:
        remedy = "check root, AWS_ENDPOINT_URL_S3 and the credentials in the environment"
        return Check(what=f"storage {root}", outcome="failed", found=str(error), remedy=remedy)
    if not is_same:
        return Check(
            what=f"storage {root}", outcome="failed", found="other bytes came back", remedy="use another store"
        )
    return Check(what=f"storage {root}", outcome="ok", found="create-only writes, 1 KB there and back")


def _prefect() -> Iterator[Check]:
    """The server, and for each work pool the workers that are alive."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL

    url = PREFECT_API_URL.value()
    if not url:
        remedy = "set PREFECT_API_URL to use deployments; flows run here without one, each with a server of its own"
        yield Check(what="prefect", outcome="warning", found="no server is named", remedy=remedy)
        return
    try:
        with get_client(sync_client=True) as client:
            if (error := client.api_healthcheck()) is not None:
                raise error
            yield Check(what="prefect", outcome="ok", found=f"{url}, version {client.api_version()}")
            for pool in client.read_work_pools():
                workers = client._client.post(f"/work_pools/{pool.name}/workers/filter", json={}).json()
                yield _pool(pool.name, pool.type, pool.is_paused, workers)
    except Exception as error:
        yield Check(
            what="prefect",
            outcome="failed",
            found=f"{url} does not answer: {type(error).__name__}: {error}".splitlines()[0],
            remedy="start it (prefect server start), or correct PREFECT_API_URL and PREFECT_API_AUTH_STRING",
        )


def _pool(name: str, kind: str, is_paused: bool, workers: list[dict]) -> Check:
    alive = sum(worker["status"] == "ONLINE" for worker in workers)
    found = f"{kind}, {alive} of {len(workers)} workers alive" + (", paused" if is_paused else "")
    remedy = f"prefect work-pool resume {name}" if is_paused else f"prefect worker start --pool {name}"
    is_served = alive > 0 and not is_paused
    return Check(
        what=f"pool {name}", outcome="ok" if is_served else "warning", found=found, remedy="" if is_served else remedy
    )


def _mlflow() -> Check:
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        remedy = "set MLFLOW_TRACKING_URI to share one server"
        return Check(what="mlflow", outcome="ok", found="no server is named, .forge/mlflow.db is used", remedy=remedy)
    if uri.startswith("http") and not answers(f"{uri.rstrip('/')}/health"):
        remedy = "start it, or correct MLFLOW_TRACKING_URI; runs go on without it"
        return Check(what="mlflow", outcome="warning", found=f"{uri} does not answer", remedy=remedy)
    return Check(what="mlflow", outcome="ok", found=uri)
