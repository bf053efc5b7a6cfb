"""A filter of system calls (seccomp) as instructions: no sockets, no new processes, no signals to others.

Threads stay allowed. Numbers are those of the kernel's tables for each architecture.
"""

import errno
import platform
from collections.abc import Mapping

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, value

_LOAD, _JUMP_EQUAL, _JUMP_SET, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_AT_NUMBER, _AT_ARCHITECTURE, _AT_FIRST_ARGUMENT = 0, 4, 16
_CLONE_THREAD = 0x10000
_X32 = 0x40000000  # calls of another ABI of the same architecture

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Call -> its number on x86_64 and on aarch64, None where there is none.
_REFUSED: Mapping[str, tuple[int, int | None]] = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "tkill": (200, 130),
    "ptrace": (101, 117),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "perf_event_open": (298, 241),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
_LOOKED_AT = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
}


def syscall_filter(process_id: int, machine: str | None = None) -> tuple[Instruction, ...]:
    """The filter for one process, which may signal itself alone; empty for an architecture that is not known.

    A refused call fails with EPERM; ``clone3`` with ENOSYS, for which libraries fall back on ``clone``.
    """
    machine = platform.machine() if machine is None else machine
    if machine not in _AUDIT:
        return ()
    column = list(_AUDIT).index(machine)
    number_of = {name: numbers[column] for name, numbers in _LOOKED_AT.items()}
    refuse, allow = (_RETURN, 0, 0, _REFUSE | errno.EPERM), (_RETURN, 0, 0, _ALLOW)
    load_argument = (_LOAD, 0, 0, _AT_FIRST_ARGUMENT)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _AUDIT[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER),
        (_JUMP_GREATER_EQUAL, 0, 1, _X32),
        refuse,
    ]
    for numbers in _REFUSED.values():
        number = numbers[column]
        if number is not None:
            program += [(_JUMP_EQUAL, 0, 1, number), refuse]
    program += [(_JUMP_EQUAL, 0, 1, number_of["clone3"]), (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)]
    program += [(_JUMP_EQUAL, 0, 4, number_of["clone"]), load_argument, (_JUMP_SET, 1, 0, _CLONE_THREAD), refuse, allow]
    for name in ("kill", "tgkill"):
        program += [(_JUMP_EQUAL, 0, 4, number_of[name]), load_argument, (_JUMP_EQUAL, 1, 0, process_id), refuse, allow]
    program += [(_JUMP_EQUAL, 0, 5, number_of["prlimit64"]), load_argument, (_JUMP_EQUAL, 2, 0, 0)]
    program += [(_JUMP_EQUAL, 1, 0, process_id), refuse, allow]
    return (*program, allow)
