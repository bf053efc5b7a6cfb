"""Runs one program of an answer and its tests in a process of its own, shut in, and says what came of it.

What is cut off depends on the machine: ``guards`` says what holds here. Knows no tasks.
"""

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quantpipe.evaluate.sandbox.syscall_filter import syscall_filter

CHILD = Path(__file__).with_name("child.py")
MOST_OUTPUT_BYTES = 1 << 20
MOST_SHOWN_CHARS = 300
FILE_BYTES = 16 << 20  # of all files that a program may write
STARTING_S = 10.0  # on top of a program's own time: a busy machine starts an interpreter slowly


@dataclass(frozen=True)
class Limits:
    """Of one program: seconds on the clock (and of processor time), and bytes of address space."""

    timeout_s: float = 10.0
    memory_bytes: int = 512 << 20


@dataclass(frozen=True)
class Guards:
    """What a program cannot reach on this machine: the network, new or other processes, files outside its folder."""

    network: bool
    processes: bool
    files: bool

    @property
    def missing(self) -> tuple[str, ...]:
        """What is not cut off."""
        return tuple(name for name in ("network", "processes", "files") if not getattr(self, name))


@dataclass(frozen=True)
class Outcome:
    """Whether answer and tests ran to their end, in a few words why not, and the end of what was printed."""

    is_passed: bool
    reason: str
    output: str = ""
    guards: Guards | None = None


def guards() -> Guards:
    """Find out, by running an empty program, what holds on this machine."""
    held = run_program("", "", Limits()).guards
    return held or Guards(False, False, False)


def run_program(answer: str, tests: str, limits: Limits) -> Outcome:
    """Run ``answer``, then ``tests`` in the same names. Every process of it is gone when this returns."""
    with tempfile.TemporaryDirectory(prefix="quantpipe-code-") as folder:
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb", buffering=0) as channel:
            try:
                process = _start(folder, writing)
            finally:
                os.close(writing)
            try:
                asked = _asked(answer, tests, limits, process.pid, writing)
                return _watch(process, channel.fileno(), asked, limits)
            finally:
                _end(process)


def _start(folder: str, channel: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env={},
        pass_fds=(channel,),
        start_new_session=True,
    )


def _asked(answer: str, tests: str, limits: Limits, process_id: int, channel: int) -> dict[str, object]:
    return {
        "answer": answer,
        "tests": tests,
        "channel": channel,
        "secret": secrets.token_hex(16),
        "filter": syscall_filter(process_id),
        "cpu_s": int(limits.timeout_s) + 1,
        "memory_bytes": limits.memory_bytes,
        "file_bytes": FILE_BYTES,
    }


def _watch(process: "subprocess.Popen[bytes]", channel: int, asked: dict[str, object], limits: Limits) -> Outcome:
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(asked).encode())
        process.stdin.close()
    said, printed, reason = {channel: b"", process.stdout.fileno(): b""}, process.stdout.fileno(), ""
    deadline_s = time.monotonic() + STARTING_S
    has_begun = False
    with selectors.DefaultSelector() as selector:
        for descriptor in said:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map() and not reason:
            left_s = deadline_s - time.monotonic()
            ready = selector.select(max(left_s, 0))
            if not ready and left_s <= 0:
                reason = f"took more than {limits.timeout_s:g} s"
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    selector.unregister(key.fd)
                said[key.fd] += piece
                if len(said[key.fd]) > MOST_OUTPUT_BYTES:
                    reason = f"printed more than {MOST_OUTPUT_BYTES >> 20} MiB"
            if not has_begun and b"\n" in said[channel]:
                has_begun, deadline_s = True, time.monotonic() + limits.timeout_s
    lines = said[channel].decode(errors="replace").splitlines()
    held = Guards(**json.loads(lines[0])) if lines else None
    is_passed = not reason and len(lines) == 2 and secrets.compare_digest(lines[1], str(asked["secret"]))
    text = said[printed].decode(errors="replace").strip()
    return Outcome(is_passed, "" if is_passed else reason or _why(process, text), text[-MOST_SHOWN_CHARS:], held)


def _why(process: "subprocess.Popen[bytes]", output: str) -> str:
    code = process.wait()
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    last = output.rpartition("\n")[2].strip()
    return last[:MOST_SHOWN_CHARS] or f"ended with exit code {code} before its tests did"


def _end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(BrokenPipeError):
                stream.close()
