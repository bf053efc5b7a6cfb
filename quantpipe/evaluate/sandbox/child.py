"""What runs in the sandboxed process: shuts itself in, step by step, says which steps held, and runs the program.

A script of the standard library alone, run with ``python -I -S``. It reads one JSON object from standard input, and
writes to the descriptor named in it: a line of what holds, then, if the program passed, a line with the secret.
"""

import contextlib
import ctypes
import json
import os
import resource
import sys
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_NEW_USER, _NEW_NET, _NEW_MOUNTS, _NEW_IPC = 0x10000000, 0x40000000, 0x00020000, 0x08000000
_PRIVATE, _RECURSIVE = 0x40000, 0x4000
_MOUNT_SETATTR, _AT_RECURSIVE, _AT_FDCWD = 442, 0x8000, -100
_READ_ONLY_NO_SETUID_NO_DEVICES = 1 | 2 | 4
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _SECCOMP_FILTER = 38, 22, 2
_CAPABILITIES_VERSION = 0x20080522
# Landlock's rights that change files: write, remove, make of every kind; then by version: move, truncate.
_WRITES = (0x1FF2, 0x1FF2 | 1 << 13, 0x1FF2 | 1 << 13 | 1 << 14)
MOST_OPEN_FILES = 64
MOST_PROCESSES = 256  # of the user, where the filter of system calls does not hold


def main() -> None:
    """Shut in, say what holds, run, and say whether it passed."""
    asked = json.loads(sys.stdin.buffer.read())
    held = shut_in(asked)
    channel = asked["channel"]
    os.write(channel, (json.dumps(held) + "\n").encode())
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for name in ("answer", "tests"):
        exec(compile(asked[name], f"<{name}>", "exec"), namespace)
    sys.stdout.flush()
    os.write(channel, (asked["secret"] + "\n").encode())
    os._exit(0)


def shut_in(asked: dict[str, Any]) -> dict[str, bool]:
    """Every step that the machine allows; which of ``network``, ``processes`` and ``files`` are cut off."""
    set_limits(asked)
    has_network_namespace = has_read_only_files = False
    with contextlib.suppress(OSError):
        new_namespaces()
        has_network_namespace = True
        read_only_files(asked["file_bytes"])
        has_read_only_files = True
    _call(_libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    has_landlock = False
    with contextlib.suppress(OSError):
        landlock()
        has_landlock = True
    drop_capabilities()
    has_filter = False
    with contextlib.suppress(OSError):
        filter_calls(asked["filter"])
        has_filter = bool(asked["filter"])
    if not has_filter:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NPROC, (MOST_PROCESSES, MOST_PROCESSES))
    return {
        "network": has_network_namespace or has_filter,
        "processes": has_filter,
        "files": has_read_only_files or has_landlock,
    }


def set_limits(asked: dict[str, Any]) -> None:
    """Processor time, memory, sizes of files, open files; no core dumps."""
    limits = {
        resource.RLIMIT_CPU: asked["cpu_s"],
        resource.RLIMIT_AS: asked["memory_bytes"],
        resource.RLIMIT_FSIZE: asked["file_bytes"],
        resource.RLIMIT_NOFILE: MOST_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def new_namespaces() -> None:
    """Users, network, mounts and shared memory of its own: no interface is there, not even the loopback is up."""
    user, group = os.getuid(), os.getgid()
    _call(_libc.unshare(_NEW_USER | _NEW_NET | _NEW_MOUNTS | _NEW_IPC))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 - few modules, few things loaded
            file.write(text)


def read_only_files(file_bytes: int) -> None:
    """Everything read only and without devices, ``/proc`` empty, and memory of a bounded size as working folder."""
    here = os.getcwd().encode()  # noqa: PTH109
    _call(_libc.mount(None, b"/", None, _PRIVATE | _RECURSIVE, None))
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY_NO_SETUID_NO_DEVICES, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    _call(_libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(attributes), size))
    _call(_libc.mount(b"tmpfs", b"/proc", b"tmpfs", 1 | 2 | 4, b"size=4k"))
    _call(_libc.mount(b"tmpfs", here, b"tmpfs", 2 | 4, f"size={file_bytes}".encode()))
    os.chdir(here)


def landlock() -> None:
    """Nothing may be changed outside of the working folder."""
    version = _libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    _call(version)
    rights = _WRITES[min(version, len(_WRITES)) - 1]
    rules = (ctypes.c_uint64 * 1)(rights)
    ruleset = _libc.syscall(_LANDLOCK_CREATE, ctypes.byref(rules), ctypes.sizeof(rules), 0)
    _call(ruleset)
    folder = os.open(".", os.O_PATH)
    beneath = rights.to_bytes(8, sys.byteorder) + folder.to_bytes(4, sys.byteorder)
    _call(_libc.syscall(_LANDLOCK_ADD, ruleset, 1, beneath, 0))
    _call(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0))
    os.close(folder)
    os.close(ruleset)


def drop_capabilities() -> None:
    """What a superuser may do beyond an ordinary user."""
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    _call(_libc.capset(ctypes.byref(header), ctypes.byref(none)))


def filter_calls(instructions: list[list[int]]) -> None:
    """Refuse system calls from now on."""

    class Instruction(ctypes.Structure):
        _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(Instruction)))

    if not instructions:
        return
    listed = (Instruction * len(instructions))(*(Instruction(*each) for each in instructions))
    program = Program(len(instructions), listed)
    _call(_libc.prctl(_SET_SECCOMP, _SECCOMP_FILTER, ctypes.byref(program), 0, 0))


def _call(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    main()
