"""A server as a process: started on a free port, waited for, weighed, ended. Or one that runs already, by its URL."""

import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from json import loads
from pathlib import Path

READY_S = 900.0
POLL_S = 0.05
END_S = 20.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Server:
    """``command`` is a shell-like line with ``{port}`` in it, or the URL of a server that others started."""

    def __init__(self, name: str, command: str) -> None:
        self.name, self.command = name, command
        self.model = ""
        self.ready_s: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.url = command.rstrip("/") if command.startswith(("http://", "https://")) else ""

    @property
    def is_ours_to_start(self) -> bool:
        return not self.command.startswith(("http://", "https://"))

    def start(self, log: Path) -> None:
        """Start it where it is not running, and wait until it answers. SystemExit where it ends before."""
        started_s = time.perf_counter()
        if self.is_ours_to_start:
            port = _free_port()
            self.url = f"http://127.0.0.1:{port}"
            with log.open("wb") as file:
                command = shlex.split(self.command.format(port=port))
                self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        while not (model := _model(self.url)):
            if self._process is not None and self._process.poll() is not None:
                raise SystemExit(f"{self.name}: ended with {self._process.returncode}; see {log}")
            if time.perf_counter() - started_s > READY_S:
                self.stop()
                raise SystemExit(f"{self.name}: not ready after {READY_S:.0f} s; see {log}")
            time.sleep(POLL_S)
        self.model = model
        self.ready_s = time.perf_counter() - started_s if self.is_ours_to_start else None

    @property
    def pids(self) -> list[int]:
        """Of the process and all that descend from it, itself first; none where it is not known which they are."""
        return [] if self._process is None else family(self._process.pid)

    def resident_mb(self) -> float | None:
        """Memory of the process and its children; None where it is not known which they are."""
        if self._process is None:
            return None
        return sum(_resident_kb(pid) for pid in self.pids) / 1024

    def processor_s(self) -> float | None:
        """Processor time of the process and its children by now; None where it is not known which they are."""
        if self._process is None:
            return None
        return sum(cpu_s(pid) for pid in self.pids)

    def stop(self) -> None:
        """End what ``start`` started."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def cpu_s(pid: int) -> float:
    """Processor time of one process so far."""
    times = (Path("/proc") / str(pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / TICKS_PER_S


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _model(url: str) -> str:
    """The name of the model served there; empty while nobody answers."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as reply:
            return str(loads(reply.read())["data"][0]["id"])
    except (OSError, urllib.error.URLError, ValueError, LookupError):
        return ""


def family(pid: int) -> list[int]:
    """The process and all that descend from it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    except OSError:
        return []
    return [pid, *(other for child in children for other in family(int(child)))]


def _resident_kb(pid: int) -> int:
    """Its own pages, and its share of those that several processes hold."""
    for name, field in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            lines = Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        return next((int(line.split()[1]) for line in lines if line.startswith(field)), 0)
    return 0
