"""A server under mixed load for long: what fails, what leaks, what grows, how late the slowest are.

    python bench/server_soak.py ARTIFACT --minutes 60 --clients 12

Each client asks over and over, drawn by ``--seed``: streams read to their end, whole replies, streams left after some
chunks, whole replies left before they come, requests that must be refused, and streams read slowly. Every reply is
checked: status, finish reason, ``[DONE]``. Memory (anonymous pages) of the front and of the engine's process is read
every ``--sample-s`` seconds; slopes are by least squares over the second half, when caches have grown to their size. At
the end nothing may be queued, run, or hold a KV block.

Ends with 1 where a reply was wrong, a block is held, or the engine was replaced.
"""

import argparse
import asyncio
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from servers.process import Server
from servers.soak_client import Found, SoakClient

from quantpipe.bench.latency import percentile
from quantpipe.gate.record import machine_facts, utc_now
from quantpipe.gate.report import markdown_table

SETTLE_S = 10.0


def anonymous_mb(pid: int) -> float:
    """Memory of a process's own: files that are mapped come and go."""
    lines = (Path("/proc") / str(pid) / "status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) / 1e6 for line in lines if line.startswith("RssAnon:"))


async def soak(
    asked: argparse.Namespace, server: Server
) -> tuple[Found, list[tuple[float, float, float]], Counter[str]]:
    """The load; memory of both processes as it went on (seconds, front MB, engine MB); what is held at the end."""
    found, samples = Found(), []
    started_s = time.monotonic()
    until_s = started_s + 60 * asked.minutes
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
        draws = [random.Random(f"{asked.seed} {number}") for number in range(asked.clients)]
        clients = [asyncio.create_task(SoakClient(http, server.model, found, draw).run(until_s)) for draw in draws]
        while time.monotonic() < until_s:
            front_pid, engine_pid, *_ = server.pids
            samples.append((time.monotonic() - started_s, anonymous_mb(front_pid), anonymous_mb(engine_pid)))
            await asyncio.sleep(asked.sample_s)
        await asyncio.gather(*clients)
        left = await _left(http)
        settle_s = time.monotonic() + SETTLE_S
        while any(left[name] for name in ("running", "waiting", "held")) and time.monotonic() < settle_s:
            await asyncio.sleep(0.2)
            left = await _left(http)
        left["restarts"] = (await http.get("/health")).json()["num_restarts"]
    return found, samples, left


async def _left(http: httpx.AsyncClient) -> Counter[str]:
    text = (await http.get("/metrics")).text
    patterns = {
        "running": r"^quantpipe:num_requests_running (\S+)$",
        "waiting": r"^quantpipe:num_requests_waiting (\S+)$",
        "held": r'^quantpipe:kv_blocks\{state="held"\} (\S+)$',
    }
    matches = {name: re.search(pattern, text, re.MULTILINE) for name, pattern in patterns.items()}
    return Counter({name: int(float(match[1])) for name, match in matches.items() if match is not None})


def slope_mb_per_hour(samples: list[tuple[float, float]]) -> float:
    """Least squares over the second half."""
    later = samples[len(samples) // 2 :]
    if len(later) < 2:
        return float("nan")
    slope, _ = np.polyfit([second for second, _ in later], [mb for _, mb in later], 1)
    return 3600 * float(slope)


def report(found: Found, samples: list[tuple[float, float, float]], left: Counter[str]) -> str:
    """Tables of requests and of memory, and what is wrong."""
    rows = []
    for name, num in sorted(found.counts.items()):
        own = found.latencies_s[name]
        figures = [f"{percentile(own, share):.3f}" for share in (50, 99)] if own else ["", ""]
        rows.append((name, num, found.busy[name], *figures))
    parts = [markdown_table(("requests", "answered", "of these 503", "p50, s", "p99, s"), rows, right={1, 2, 3, 4})]
    memory = []
    for column, name in ((1, "front"), (2, "engine")):
        own = [(sample[0], sample[column]) for sample in samples]
        memory.append((name, f"{own[0][1]:.1f}", f"{own[-1][1]:.1f}", f"{slope_mb_per_hour(own):.1f}"))
    parts.append(markdown_table(("memory", "first, MB", "last, MB", "slope, MB/hour"), memory, right={1, 2, 3}))
    parts.append(f"left behind: {dict(left)}; wrong replies: {len(found.faults)}")
    return "\n\n".join([*parts, *found.faults[:20]])


@contextmanager
def served(asked: argparse.Namespace) -> Iterator[Server]:
    program = "from quantpipe.cli import main; main()"
    command = f"{sys.executable} -c '{program}' serve {asked.model} --allow-ungated --port {{port}} {asked.options}"
    server = Server("soaked", command)
    try:
        server.start(Path(tempfile.mkdtemp(prefix="soak-")) / "server.log")
        yield server
    finally:
        server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path, help="artifact to serve")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--sample-s", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--options", default="--max-num-seqs 8 --max-model-len 512", help="for `quantpipe serve`")
    asked = parser.parse_args()
    with served(asked) as server:
        found, samples, left = asyncio.run(soak(asked, server))
    machine = ", ".join(f"{name} {value}" for name, value in machine_facts().items())
    print(f"{utc_now()}; {machine}; {asked.minutes:g} minutes, {asked.clients} clients, {asked.options}\n")
    print(report(found, samples, left))
    return 1 if found.faults or any(left.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
