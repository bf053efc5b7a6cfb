"""What serving over HTTP costs: against the engine in one's own process, and in front of an engine that takes no time.

    python bench/server_front.py ARTIFACT --text README.md --concurrency 8 64

Bursts: as many prompts as the concurrency says, all at once, each of them once, greedy, end token ignored. Every
repeat has new prompts, the same ones for both sides, which take turns in an order that is reversed each time; ratios
are paired within repeats. In process: the loop of ``Engine.generate``, in this script. HTTP: streams of
`quantpipe serve` with the same settings.

With the engine that takes no time (``servers/null_engine.py``) a token costs what serving it costs: processor time of
the front and of the engine's process, for streams, and for replies of one token. The client shares the cores, so that
requests per second are a lower bound.

TTFT: sent, or added, to the first text, or token.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from servers.completion import complete_all
from servers.process import Server, cpu_s
from vs_cpu_servers import cut_prompts

from quantpipe.bench.latency import paired_ratio, percentile, time_burst
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.gate.record import machine_facts, utc_now
from quantpipe.gate.report import markdown_table

NULL_FRONT = Path(__file__).parent / "servers" / "null_front.py"
NUM_SHORT = 400  # requests for one token, with the null engine
NUM_ROUNDS = 4  # bursts of streams, with the null engine


@dataclass
class Side:
    """What one side did at one concurrency: a rate for each burst, and all times to first token."""

    rates_tok_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)


class Compared:
    """The two sides of one artifact."""

    def __init__(self, asked: argparse.Namespace, tokenizer: Tokenizer, server: Server) -> None:
        self._asked = asked
        self._tokenizer = tokenizer
        self._server = server
        self._engine = Engine.open(asked.model, EngineConfig(**_settings(asked)))
        self._engine.warm_up()

    def in_process(self, side: Side, prompts: Sequence[str]) -> None:
        token_ids = [self._tokenizer.encode(prompt, add_special_tokens=True) for prompt in prompts]
        times, wall_s = time_burst("own", self._engine, token_ids, self._asked.new_tokens, time.perf_counter)
        side.rates_tok_s.append(len(prompts) * self._asked.new_tokens / wall_s)
        side.ttft_s += [each.ttft_s for each in times]

    def over_http(self, side: Side, prompts: Sequence[str]) -> None:
        run = complete_all(self._server.url, self._server.model, prompts, self._asked.new_tokens, len(prompts))
        replies, wall_s = asyncio.run(run)
        side.rates_tok_s.append(len(prompts) * self._asked.new_tokens / wall_s)
        side.ttft_s += [reply.ttft_s for reply in replies]

    def at(self, level: int, prompts: Iterator[str]) -> tuple[Side, Side]:
        """In process and over HTTP at one concurrency, after a burst of each that does not count."""
        own, http = Side(), Side()
        for repeat in range(-1, self._asked.repeats):
            burst = [next(prompts) for _ in range(level)]
            turns = [(self.in_process, own), (self.over_http, http)]
            for take_turn, side in turns if repeat % 2 == 0 else reversed(turns):
                take_turn(Side() if repeat < 0 else side, burst)
        return own, http


def compare(asked: argparse.Namespace, logs: Path) -> str:
    """Tokens per second and times to first token of both sides, by concurrency."""
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in _settings(asked).items())
    program = "from quantpipe.cli import main; main()"
    server = Server(
        "http", f"{sys.executable} -c '{program}' serve {asked.model} --allow-ungated {options} --port {{port}}"
    )
    tokenizer = Tokenizer.open(asked.model)
    num_prompts = sum(asked.concurrency) * (asked.repeats + 1)
    text = asked.text.read_text(encoding="utf-8")
    prompts = iter(cut_prompts(tokenizer, text, num_prompts, asked.prompt_tokens, asked.seed))
    rows = []
    try:
        server.start(logs / "server.log")
        compared = Compared(asked, tokenizer, server)
        for level in asked.concurrency:
            own, http = compared.at(level, prompts)
            ratio = paired_ratio("tok_s", list(zip(own.rates_tok_s, http.rates_tok_s, strict=True)))
            shown = f"{ratio.value:.3f} ({ratio.low:.3f} .. {ratio.high:.3f})"
            rows += [(level, "in process", *_figures(own), ""), (level, "HTTP", *_figures(http), shown)]
    finally:
        server.stop()
    headings = ("concurrency", "side", "tok/s", "TTFT p50, s", "TTFT p99, s", "HTTP / in process (90 % interval)")
    return markdown_table(headings, rows, right={0, 2, 3, 4})


def cost_of_front(asked: argparse.Namespace, logs: Path) -> str:
    """What the processes of a server spend where the engine spends nothing."""
    server = Server("null", f"{sys.executable} {NULL_FRONT} {asked.model} {{port}}")
    rows = []
    try:
        server.start(logs / "null.log")
        asyncio.run(complete_all(server.url, server.model, ["Hello"] * NUM_SHORT, 1, 8))  # warms up
        for level in asked.concurrency:
            for load, num, new_tokens in (
                ("streams", NUM_ROUNDS * level, asked.null_tokens),
                ("one token", NUM_SHORT, 1),
            ):
                front_pid, engine_pid, *_ = server.pids
                before_s = cpu_s(front_pid), cpu_s(engine_pid)
                _, wall_s = asyncio.run(complete_all(server.url, server.model, ["Hello"] * num, new_tokens, level))
                front_us = 1e6 * (cpu_s(front_pid) - before_s[0])
                engine_us = 1e6 * (cpu_s(engine_pid) - before_s[1])
                num_tokens = num * new_tokens
                figures = (num / wall_s, num_tokens / wall_s, front_us / num_tokens, engine_us / num_tokens)
                rows.append((level, load, *(f"{figure:.0f}" for figure in figures)))
    finally:
        server.stop()
    headings = ("concurrency", "load", "requests/s", "tok/s", "front, CPU µs/token", "engine, CPU µs/token")
    return markdown_table(headings, rows, right={0, 2, 3, 4, 5})


def _settings(asked: argparse.Namespace) -> dict[str, int]:
    most = max(asked.concurrency)
    return {"max_num_seqs": most, "max_model_len": asked.max_model_len, "num_threads": asked.threads}


def _figures(side: Side) -> tuple[str, ...]:
    ttft = (percentile(side.ttft_s, 50), percentile(side.ttft_s, 99))
    return (f"{percentile(side.rates_tok_s, 50):.1f}", *(f"{figure:.3f}" for figure in ttft))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path, help="artifact to serve")
    parser.add_argument("--text", type=Path, required=True, help="text that prompts are cut from")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--null-tokens", type=int, default=128, help="tokens of each stream of the null engine")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["artifact", "null"], help="one of the two tables")
    return parser.parse_args()


def main() -> None:
    asked = parse_options()
    logs = Path(tempfile.mkdtemp(prefix="servers-"))
    parts = {"artifact": compare, "null": cost_of_front}
    tables = [make(asked, logs) for name, make in parts.items() if asked.only in (None, name)]
    machine = ", ".join(f"{name} {value}" for name, value in machine_facts().items())
    print(f"{utc_now()}; {machine}; {asked.prompt_tokens} + {asked.new_tokens} tokens\n\n" + "\n\n".join(tables))


if __name__ == "__main__":
    main()
