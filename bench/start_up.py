"""What it costs until `quantpipe serve` takes requests: seconds on the wall and of processors, and memory.

    python bench/start_up.py MODEL ... --repeats 3

Each start is a process of its own; folders take turns. The first of each folder is not counted, so that kernels are
compiled and files lie in memory. Front and engine are two processes, which are counted together. Of memory, `anonymous`
is their own; the others count mapped files as well, those that both have mapped twice.
"""

import argparse
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from servers.process import cpu_s, family

COLUMNS = ("model", "wall, s", "CPU, s", "peak, MB", "resident, MB", "anonymous, MB")
READY = "quantpipe: serving"


class Start(NamedTuple):
    """One start: seconds, and megabytes once requests are taken."""

    wall_s: float
    cpu_s: float
    peak_mb: float
    resident_mb: float
    anonymous_mb: float


def start_once(folder: Path, options: Sequence[str]) -> Start:
    """Start a server of ``folder`` with further ``options``, and stop it once it is ready."""
    program = "from quantpipe.cli import main; main()"
    command = [sys.executable, "-c", program, "serve", str(folder), "--allow-ungated", "--port", "0", *options]
    started_s = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None, "asked for"
        line = server.stdout.readline()
        wall_s = time.monotonic() - started_s
        if not line.startswith(READY):
            raise SystemExit(f"{folder}: the server did not start")
        pids = family(server.pid)
        cpu_time_s = sum(map(cpu_s, pids))
        memory = [_memory_mb(pid) for pid in pids]
        server.send_signal(signal.SIGTERM)
    return Start(wall_s, cpu_time_s, *map(sum, zip(*memory, strict=True)))


def _memory_mb(pid: int) -> tuple[float, ...]:
    """Of one process: at its peak, resident, anonymous."""
    lines = (Path("/proc") / str(pid) / "status").read_text().splitlines()
    entries = dict(line.split(":", 1) for line in lines)
    return tuple(1024 * int(entries[name].split()[0]) / 1e6 for name in ("VmHWM", "VmRSS", "RssAnon"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("models", nargs="+", type=Path, help="model folders")
    parser.add_argument("--repeats", type=int, default=3, help="starts of each that count")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="for `quantpipe serve`; comes last")
    args = parser.parse_args()
    starts: dict[Path, list[Start]] = {folder: [] for folder in args.models}
    for _ in range(1 + args.repeats):
        for folder, own in starts.items():
            own.append(start_once(folder, args.options))
    print(f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 1)}")
    for folder, own in starts.items():
        medians = [statistics.median(values) for values in zip(*own[1:], strict=True)]
        seconds, megabytes = medians[:2], medians[2:]
        print(f"| {folder.name} | {' | '.join([*(f'{s:.2f}' for s in seconds), *(f'{mb:.0f}' for mb in megabytes)])} |")


if __name__ == "__main__":
    main()
