"""The inside of the sandbox: gives up what a program must not have, then runs it. Imports the standard library alone.

Started by `forge_core.rewards.sandbox` as `python -I -S -B sandbox_child.py`, with one line of JSON on its standard
input: {"program", "check", "word", "word_to", "seconds", "megabytes", "readable", "is_isolated"}. What follows that
line is the program's own input. The word is written to descriptor `word_to` once the check has come to its end.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import sys

CANNOT_ISOLATE = 97  # exit code
_NEW_USER, _NEW_NETWORK, _NEW_IPC = 0x10000000, 0x40000000, 0x08000000  # linux/sched.h
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_NO_NEW_PRIVILEGES = 38  # linux/prctl.h
_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, list a directory
# (fork, vfork, clone, clone3), (kill, tkill, tgkill, pidfd_send_signal), (ptrace, process_vm_readv, process_vm_writev),
# prlimit64: by machine, with the number that seccomp knows it by (linux/audit.h).
_DENIED = {
    "x86_64": (0xC000003E, (57, 58, 56, 435, 62, 200, 234, 424, 101, 310, 311, 302)),
    "aarch64": (0xC00000B7, (220, 435, 129, 130, 131, 424, 117, 270, 271, 261)),
}
_LOAD, _JUMP_EQUAL, _JUMP_GREATER, _RETURN = 0x20, 0x15, 0x35, 0x06  # classic BPF
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_SECCOMP, _FILTER = 22, 2
_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # rights on files that a kernel knows, linux/landlock.h

libc = ctypes.CDLL(None, use_errno=True)


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("directory", ctypes.c_int32))


def _call(what: str, result: int) -> int:
    if result < 0:
        sys.stderr.write(f"cannot {what}: {os.strerror(ctypes.get_errno())}\n")
        sys.stderr.flush()
        os._exit(CANNOT_ISOLATE)
    return result


def limit(seconds: int, megabytes: int) -> None:
    """Bounds of what the kernel counts."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # SIGXCPU says why; a program that ignores it dies
    for name, bound in (
        (resource.RLIMIT_AS, megabytes * 2**20),
        (resource.RLIMIT_FSIZE, 16 * 2**20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (bound, bound))


def isolate(readable: list[str]) -> None:
    """No network, no process but its own, no file but the standard library's and those of the working directory."""
    _call("leave the network", libc.unshare(_NEW_USER | _NEW_NETWORK | _NEW_IPC))
    abi = _call("find Landlock", libc.syscall(_CREATE_RULESET, None, 0, 1))
    rights = (1 << _RIGHTS_BY_ABI.get(abi, 16)) - 1
    handled = ctypes.c_uint64(rights)
    ruleset = _call("restrict files", libc.syscall(_CREATE_RULESET, ctypes.byref(handled), ctypes.sizeof(handled), 0))
    for path, allowed in (*((path, _READ & rights) for path in readable), (".", rights)):
        directory = os.open(path, os.O_PATH | os.O_DIRECTORY)
        rule = _PathBeneath(allowed, directory)
        _call("allow a directory", libc.syscall(_ADD_RULE, ruleset, 1, ctypes.byref(rule), 0))
        os.close(directory)
    _call("give up privileges", libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _call("restrict files", libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)
    refuse_calls()


def refuse_calls() -> None:
    """No further process or thread, and no word to another one: these system calls fail with EPERM from now on."""
    if platform.machine() not in _DENIED:
        ctypes.set_errno(errno.ENOSYS)
        _call(f"filter the system calls of {platform.machine()}", -1)
    machine, denied = _DENIED[platform.machine()]
    refusal = len(denied) + 1  # how far it is from the first comparison of a number
    code = [
        (_LOAD, 0, 0, 4),  # the machine the call is for
        (_JUMP_EQUAL, 0, refusal + 2, machine),
        (_LOAD, 0, 0, 0),  # its number
        (_JUMP_GREATER, refusal, 0, 0x40000000),  # x32's second numbering
        *((_JUMP_EQUAL, refusal - place - 1, 0, number) for place, number in enumerate(denied)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    instructions = (_Instruction * len(code))(*code)
    program = _Program(len(code), instructions)
    _call("filter system calls", libc.prctl(_SECCOMP, _FILTER, ctypes.byref(program), 0, 0))


def main() -> None:
    """Read the order, give up everything, run."""
    order = json.loads(_read_line(0))
    limit(order["seconds"], order["megabytes"])
    if order["is_isolated"]:
        isolate(order["readable"])
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(order["program"], "program.py", "exec"), names)
    if order["check"]:
        exec(compile(order["check"], "check.py", "exec"), names)
    sys.stdout.flush()
    os.write(order["word_to"], order["word"].encode())


def _read_line(file: int) -> bytes:
    """One line, and not a byte more: the rest is the program's."""
    found = b""
    while not found.endswith(b"\n"):
        piece = os.read(file, 1)
        if not piece:
            break
        found += piece
    return found


if __name__ == "__main__":
    main()
