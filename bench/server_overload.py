"""A server under ten times the load that it can carry: what it still gets done, and how soon it turns others away.

    python bench/server_overload.py \\
        --server "quantpipe serve W8A8 --allow-ungated --port {port} --max-open-prompts 32"

Each round measures two things for ``--seconds``, in turns, after ``--warm-s`` that do not count:

- capacity: ``--clients`` clients, each with one request at a time, fewer than the server takes at once. Nobody is
  refused; the rate of answers is what the server can do.
- overload: requests come at ``--load`` times that rate whatever becomes of them, none of which tries again.

Goodput are answers per second, complete ones only (200, all of ``--new-tokens``). ``kept`` is the share of it that is
left under overload. By processor time, answers count per second that the server's processes computed, refusals
included: the share that holds whatever else the machine does meanwhile. Prompts are random token ids, so that no two
have a prefix in common. Times of refusals are from connecting to the end of the reply, and include what the clients
need, which share the machine; as does the time of ``/health``, asked ten times a second meanwhile.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from servers.process import Server

from quantpipe.bench.latency import percentile
from quantpipe.gate.record import machine_facts, utc_now
from quantpipe.gate.report import markdown_table

NUM_TOKEN_IDS = 1000  # prompts are made of the first ones, which every vocabulary has
SHARES = (50, 90, 99, 100)


@dataclass(frozen=True)
class Answer:
    """One reply: its status, when it had ended (``time.perf_counter``), how long it took, what Retry-After said."""

    status: int
    ended_s: float
    took_s: float
    retry_after_s: int | None


@dataclass
class Phase:
    """All that came of one measurement, and from when to when it counts."""

    begin_s: float
    end_s: float
    answers: list[Answer] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    processor_s: float | None = None

    @property
    def goodput_of_processor(self) -> float | None:
        num = sum(answer.status == 200 for answer in self.counted)
        return None if not self.processor_s else num / self.processor_s

    @property
    def counted(self) -> list[Answer]:
        return [answer for answer in self.answers if self.begin_s <= answer.ended_s < self.end_s]

    @property
    def goodput(self) -> float:
        return sum(answer.status == 200 for answer in self.counted) / (self.end_s - self.begin_s)

    def times_ms(self, status: int) -> list[float]:
        return [1e3 * answer.took_s for answer in self.counted if answer.status == status]


async def ask(url: str, path: str, body: dict[str, object] | None = None) -> Answer:
    """One request on a connection of its own. Status 0: the connection was refused or broken."""
    where = urlsplit(url)
    content = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    started_s = time.perf_counter()
    status, retry_after_s = 0, None
    try:
        reader, writer = await asyncio.open_connection(where.hostname, where.port or 80)
        try:
            writer.write(head.encode() + content)
            reply = await reader.read()
        finally:
            writer.close()
        first, _, _ = reply.partition(b"\r\n\r\n")
        status = int(first.split(b" ", 2)[1])
        told = [line.split(b":")[1] for line in first.lower().split(b"\r\n") if line.startswith(b"retry-after:")]
        retry_after_s = int(told[0]) if told else None
    except (OSError, IndexError, ValueError):
        pass
    ended_s = time.perf_counter()
    return Answer(status, ended_s, ended_s - started_s, retry_after_s)


class Load:
    """Requests of one kind to one server."""

    def __init__(self, server: Server, asked: argparse.Namespace) -> None:
        self._server, self._url, self._model, self._asked = server, server.url, server.model, asked
        self._draw = random.Random(asked.seed)

    async def one(self, phase: Phase) -> None:
        body: dict[str, object] = {
            "model": self._model,
            "prompt": [self._draw.randrange(NUM_TOKEN_IDS) for _ in range(self._asked.prompt_tokens)],
            "max_tokens": self._asked.new_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        phase.answers.append(await ask(self._url, "/v1/completions", body))

    async def at_capacity(self) -> Phase:
        phase = self._phase()

        async def in_turn() -> None:
            while time.perf_counter() < phase.end_s:
                await self.one(phase)

        await asyncio.gather(self._watch(phase), *(in_turn() for _ in range(self._asked.clients)))
        return phase

    async def overloaded(self, per_s: float) -> Phase:
        """Requests at times of their own, on average ``per_s`` in a second."""
        phase = self._phase()
        asking: set[asyncio.Task[None]] = set()
        watch = asyncio.create_task(self._watch(phase))
        due_s = time.perf_counter()
        while due_s < phase.end_s:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            asking.add(asyncio.create_task(self.one(phase)))
            due_s += self._draw.expovariate(per_s)
        await asyncio.gather(watch, *asking)
        return phase

    def _phase(self) -> Phase:
        begin_s = time.perf_counter() + self._asked.warm_s
        return Phase(begin_s, begin_s + self._asked.seconds)

    async def _watch(self, phase: Phase) -> None:
        before_s = None
        while time.perf_counter() < phase.end_s:
            if before_s is None and time.perf_counter() >= phase.begin_s:
                before_s = self._server.processor_s()
            answer = await ask(self._url, "/health")
            if answer.status != 200:
                raise SystemExit(f"/health answered {answer.status}")
            phase.health_s.append(answer.took_s)
            await asyncio.sleep(0.1)
        now_s = self._server.processor_s()
        phase.processor_s = None if now_s is None or before_s is None else now_s - before_s


async def measure(server: Server, asked: argparse.Namespace) -> list[tuple[Phase, Phase]]:
    """Pairs of capacity and overload."""
    load = Load(server, asked)
    pairs = []
    for number in range(asked.repeats):
        capacity = await load.at_capacity()
        refused = [answer for answer in capacity.answers if answer.status != 200]
        if refused:
            raise SystemExit(f"{refused[0].status} at capacity: give fewer --clients than the server takes at once")
        overload = await load.overloaded(asked.load * capacity.goodput)
        pairs.append((capacity, overload))
        print(f"round {number}: {capacity.goodput:.2f} at capacity, {overload.goodput:.2f} overloaded", flush=True)
    return pairs


def report(pairs: Sequence[tuple[Phase, Phase]], load: float) -> str:
    """Two tables: goodput, and times."""
    rows = [
        (
            f"{capacity.goodput:.2f}",
            f"{len(overload.counted) / (overload.end_s - overload.begin_s):.1f}",
            f"{overload.goodput:.2f}",
            f"{overload.goodput / capacity.goodput:.2f}",
            kept_of_processor(capacity, overload),
            ", ".join(f"{number} x {status}" for status, number in sorted(statuses_of(overload).items())),
        )
        for capacity, overload in pairs
    ]
    goodput = markdown_table(
        (
            "capacity, req/s",
            f"answered at {load:g} x, req/s",
            "goodput, req/s",
            "kept",
            "kept, by processor time",
            "answers",
        ),
        rows,
        right={0, 1, 2, 3, 4},
    )
    over = [overload for _, overload in pairs]
    told = [answer.retry_after_s for phase in over for answer in phase.counted if answer.retry_after_s is not None]
    times = [
        ("503, ms", [value for phase in over for value in phase.times_ms(503)]),
        ("200 overloaded, ms", [value for phase in over for value in phase.times_ms(200)]),
        ("200 at capacity, ms", [value for capacity, _ in pairs for value in capacity.times_ms(200)]),
        ("/health overloaded, ms", [1e3 * value for phase in over for value in phase.health_s]),
        ("Retry-After, s", [float(value) for value in told]),
    ]
    latency = markdown_table(
        ("", "number", *(f"p{share}" for share in SHARES)),
        [
            (name, str(len(values)), *(f"{percentile(values, share):.1f}" if values else "" for share in SHARES))
            for name, values in times
        ],
        right=set(range(1, 2 + len(SHARES))),
    )
    return f"{goodput}\n\n{latency}"


def kept_of_processor(capacity: Phase, overload: Phase) -> str:
    before, after = capacity.goodput_of_processor, overload.goodput_of_processor
    return "unknown" if not before or after is None else f"{after / before:.2f}"


def statuses_of(phase: Phase) -> Counter[int]:
    return Counter(answer.status for answer in phase.counted)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, help="command with {port} in it, or the URL of one that runs")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--load", type=float, default=10.0)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warm-s", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    server = Server("server", asked.server)
    with tempfile.TemporaryDirectory() as folder:
        try:
            server.start(Path(folder) / "log")
            pairs = asyncio.run(measure(server, asked))
        finally:
            server.stop()
    machine = machine_facts()
    print(f"\n{utc_now()}, {machine['cpu']}, {machine['cores']} cores\n{report(pairs, asked.load)}")


if __name__ == "__main__":
    main()
