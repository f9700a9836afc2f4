"""Carries out the faults of a drill inside a stage process.

A fault creates a marker under the drill's record before it acts; a marker that is there already means that it has acted
in an earlier attempt. The record also counts attempts, so that a drill can say what was done more than once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import secrets
import signal
import time
from datetime import UTC, datetime
from typing import Any, get_args

from forge_core import storage
from forge_core.artifacts import sha256_json
from forge_core.faults import Fault, JobFaults, Operation, Outcome, Point, inject_into_storage

logger = logging.getLogger(__name__)

HANG_SECONDS = 24 * 3600.0
SLOW_SECONDS = 2.0


class Injection:
    """The faults of the job in hand; without a drill it does nothing."""

    def __init__(self, label: str, carried: JobFaults | None, rank: int, owner_pid: int | None) -> None:
        self._label, self._carried, self._rank, self._owner_pid = label, carried, rank, owner_pid
        self._striking: dict[Fault, int] = {}  # storage faults that have begun, and how many operations are left
        self.model: Any = None  # what a NaN strikes, set by a stage that trains
        has_storage_faults = carried is not None and any(_is_storage(fault) for fault in carried.faults)
        inject_into_storage(self.on_storage if has_storage_faults else None)

    def record(self, event: str, **details: str) -> None:
        """Add an event (an attempt, a replay) of this job to the drill's record."""
        if self._carried is None or self._rank != 0:
            return
        content = {"event": event, "job": self._label, "at": datetime.now(UTC).isoformat(), **details}
        name = f"{time.time_ns()}-{secrets.token_hex(4)}"
        storage.write_atomic(f"{self._carried.record}/events/{name}.json", json.dumps(content).encode())

    def reach(self, point: Point) -> None:
        """Carry out what is planned for this point of the job."""
        for fault in self._carried.faults if self._carried else ():
            if fault.at == point and fault.rank == self._rank and self._claim(fault):
                self._strike(fault)

    def on_storage(self, operation: Operation, uri: str) -> Outcome | None:
        """Delay or refuse a storage operation, or say what is to become of an upload."""
        assert self._carried is not None
        if uri.startswith(self._carried.record):
            return None
        for fault in self._carried.faults:
            if fault.at == operation and _is_storage(fault) and fault.rank == self._rank and self._is_due(fault):
                return _strike_storage(fault, uri)
        return None

    def _is_due(self, fault: Fault) -> bool:
        if fault not in self._striking:
            self._striking[fault] = fault.times if self._claim(fault) else 0
        self._striking[fault] -= 1
        return self._striking[fault] >= 0

    def _claim(self, fault: Fault) -> bool:
        """Whether this strike is still to come; it is marked as done before it is."""
        assert self._carried is not None
        name = sha256_json(fault.model_dump())[:16]
        content = {"job": self._label, "at": datetime.now(UTC).isoformat(), "fault": fault.model_dump()}
        for strike in range(1 if _is_storage(fault) else fault.times):
            marker = f"{self._carried.record}/faults/{name}-{strike}.json"
            with contextlib.suppress(FileExistsError):
                storage.create_exclusive(marker, json.dumps(content).encode())
                logger.warning("drill: %s at %s of %s", fault.action, fault.at, self._label)
                return True
        return False

    def _strike(self, fault: Fault) -> None:
        match fault.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "kill_flow" | "kill_all":
                if self._owner_pid is not None:
                    os.kill(self._owner_pid, signal.SIGKILL)
                if fault.action == "kill_all":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(HANG_SECONDS)  # the closing channel ends this process
            case "hang":
                time.sleep(HANG_SECONDS)
            case "out_of_memory":
                raise MemoryError("injected by a drill")
            case "not_finite":
                next(self.model.parameters()).detach().fill_(math.nan)


def _is_storage(fault: Fault) -> bool:
    return fault.at in get_args(Operation)


def _strike_storage(fault: Fault, uri: str) -> Outcome | None:
    match fault.action:
        case "unavailable":  # what s3fs makes of a 503
            raise OSError(errno.EBUSY, f"SlowDown: injected by a drill at {uri}")
        case "reset":
            raise ConnectionResetError(errno.ECONNRESET, f"injected by a drill at {uri}")
        case "slow":
            time.sleep(SLOW_SECONDS)
        case "lose" | "tear":
            return fault.action
    return None
