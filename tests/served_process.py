"""A server of a model folder as a process of its own, seen and signalled from outside. Reads /proc."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, Signals
from types import TracebackType
from typing import Self

SCRIPT = """
import signal
import sys
from pathlib import Path
from quantpipe.serve.arms.split import Split
from quantpipe.serve.engine_process.watch import WatchLimits
from quantpipe.serve.front_options import FrontOptions
from quantpipe.serve.server import run_server
from quantpipe.serve.shadow.options import ShadowOptions
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
folders, drain_s, stalled_s, hung_s = sys.argv[1].split(":"), *map(float, sys.argv[2:5])
settings = {"backend": "reference", "num_threads": 1, "max_num_seqs": 4}
if sys.argv[5] == "endless":
    settings["window_tokens"] = 64
split = Split((50.0, 50.0)) if sys.argv[6] == "split" else None
shadow = ShadowOptions() if sys.argv[6] == "shadow" else None
options = FrontOptions(drain_s=drain_s, watch=WatchLimits(stalled_s, hung_s), split=split, shadow=shadow)
run_server(list(map(Path, folders)), settings, "127.0.0.1", 0, "tiny", options=options)
"""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ServedProcess:
    """Serves ``folder`` as ``tiny``, four samples at a time, until it is left; with a ``second`` half of the requests
    each, or all where that is a shadow.

    ``is_endless``: ``max_tokens`` may be any number, so that streams last as long as a test wants.
    """

    def __init__(
        self,
        folder: Path,
        drain_s: float = 30.0,
        stalled_s: float = 30.0,
        hung_s: float = 120.0,
        is_endless: bool = False,
        second: Path | None = None,
        is_shadowed: bool = False,
    ) -> None:
        arguments = [*map(str, (drain_s, stalled_s, hung_s)), "endless" if is_endless else "bounded"]
        arguments.append("alone" if second is None else "shadow" if is_shadowed else "split")
        folders = ":".join(str(own) for own in (folder, second) if own is not None)
        # A group of its own, so that both of its processes can be sent what a terminal sends.
        self._process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, folders, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._ready_line = ""

    @property
    def ready_line(self) -> str:
        """What it prints when it takes requests."""
        if not self._ready_line:
            assert self._process.stdout is not None
            self._ready_line = self._process.stdout.readline()
            assert self._ready_line.startswith("quantpipe: serving tiny on http://127.0.0.1:"), self.stderr()
        return self._ready_line

    @property
    def url(self) -> str:
        return self.ready_line.split()[4]

    @property
    def engine_pid(self) -> int | None:
        """Of the (first) engine's process; None while there is none."""
        return next(iter(self.engine_pids), None)

    @property
    def engine_pids(self) -> list[int]:
        """Of all engines' processes, the oldest first."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text(encoding="utf-8").split()
        return list(map(int, children))

    def cpu_s(self) -> float:
        """Processor time of both processes so far."""
        return sum(_cpu_s(pid) for pid in (self.pid, self.engine_pid) if pid is not None)

    def send_signal(self, number: Signals) -> None:
        """To the front alone, as ``kill`` does."""
        os.kill(self.pid, number)

    def send_to_both(self, number: Signals) -> None:
        """As a terminal does, or a service manager."""
        os.killpg(self.pid, number)

    def wait(self) -> int:
        return self._process.wait(30)

    def stderr(self) -> str:
        """All of it; the process must have ended."""
        assert self._process.stderr is not None
        return self._process.stderr.read()

    def assert_ended_quietly(self) -> None:
        assert self.wait() == 0
        found = self.stderr()
        assert found == "", found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, SIGKILL)  # the engine's, too: a stopped one would keep the pipes open
        self._process.communicate()


def is_running(pid: int) -> bool:
    """Whether a process is there that is not just waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float = 20.0) -> float:
    """Wait for it, and say how long that took."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() < started_s + seconds, f"did not happen within {seconds:g} s"
        time.sleep(0.02)
    return time.monotonic() - started_s


def _cpu_s(pid: int) -> float:
    times = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / TICKS_PER_S
