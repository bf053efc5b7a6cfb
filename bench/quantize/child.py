"""One program run as a process of its own, with what it cost. Standard library only.

A child's peak memory is never counted below what its parent held when it was started, so the driver stays small:
whatever needs torch runs in a child.
"""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TAIL_CHARS = 600


@dataclass(frozen=True)
class Cost:
    """``cpu_s`` is user and system time of all threads; ``peak_gb`` the largest resident set (mapped files count)."""

    wall_s: float
    cpu_s: float
    peak_gb: float


class ChildError(Exception):
    """The program failed; the message is the end of what it printed."""


def run_child(command: Sequence[str], log: Path, environment: Mapping[str, str], nice: int = 0) -> Cost:
    """Run ``command`` to its end with its output in ``log``. ChildError where it fails."""
    started_s = time.perf_counter()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            ["nice", "-n", str(nice), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.perf_counter() - started_s
    if process.returncode != 0:
        tail = log.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARS:].strip()
        raise ChildError(f"exit code {process.returncode}: {tail}")
    return Cost(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9)
