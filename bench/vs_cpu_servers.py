"""Servers of the OpenAI API on the same machine, taking turns: tokens per second, latencies, memory, start-up.

    python bench/vs_cpu_servers.py --tokenizer MODEL --text README.md --out results.md \\
        --server "ours bf16=quantpipe serve MODEL --port {port} --max-num-seqs 32" \\
        --server "ours w8a8=quantpipe serve W8A8 --allow-ungated --port {port} --max-num-seqs 32" \\
        --server "vllm bf16=.../bin/vllm serve MODEL --dtype bfloat16 --max-model-len 2048 --port {port}" \\
        --server "llama.cpp q4_1=http://127.0.0.1:8081"

A server is NAME=COMMAND with {port} in it, or NAME=URL. All get the same prompts, each of them once, windows of a text
about ``--prompt-tokens`` long, and give exactly ``--new-tokens`` tokens, greedy, end token ignored. Per concurrency one
burst that warms up, then ``--repeats`` rounds in which all take their turn, the order reversed every other round.
Ratios are of the first server to each other one, paired within rounds. Ended servers leave their output in ``--logs``.

TTFT: sent to first text. TPOT: (last - first token) / (n - 1) of a request. Resident: the process and its children,
after the last burst, shared pages in proportion.
"""

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from servers.completion import Reply, complete_all
from servers.process import Server

from quantpipe.bench.latency import paired_ratio, percentile
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.gate.record import machine_facts, utc_now
from quantpipe.gate.report import markdown_table

MIN_REQUESTS = 4


@dataclass
class Measured:
    """What one server did at one concurrency: the rate of each round, and the replies of all."""

    rates_tok_s: list[float] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    @property
    def cells(self) -> tuple[str, ...]:
        ttft = [reply.ttft_s for reply in self.replies]
        tpot = [1e3 * reply.tpot_s for reply in self.replies]
        return (
            f"{percentile(self.rates_tok_s, 50):.1f}",
            f"{percentile(ttft, 50):.3f}",
            f"{percentile(tpot, 50):.1f}",
            f"{percentile(tpot, 90):.1f}",
        )


Results = dict[tuple[str, int], Measured]


def cut_prompts(tokenizer: Tokenizer, text: str, num: int, num_tokens: int, seed: int) -> list[str]:
    """Windows of the text that begin at places of their own, so that no two have a prefix in common."""
    token_ids = tokenizer.encode(text)
    num_starts = len(token_ids) - num_tokens + 1
    if num_starts < num:
        raise SystemExit(
            f"--text: {len(token_ids):,} tokens have no {num:,} windows of {num_tokens}; give a longer one"
        )
    starts = random.Random(seed).sample(range(num_starts), num)
    return [tokenizer.decode(token_ids[start : start + num_tokens]) for start in starts]


def num_requests(concurrency: int, per_slot: int) -> int:
    return max(MIN_REQUESTS, concurrency * per_slot)


def measure(servers: Sequence[Server], asked: argparse.Namespace, prompts: list[str]) -> Results:
    """Every burst of every server, in turns."""
    results: Results = {}
    remaining = iter(prompts)
    for concurrency in asked.concurrency:
        for repeat in range(-1, asked.repeats):
            burst = [next(remaining) for _ in range(num_requests(concurrency, asked.requests_per_slot))]
            for server in servers if repeat % 2 == 0 else reversed(servers):
                run = complete_all(server.url, server.model, burst, asked.new_tokens, concurrency)
                replies, wall_s = asyncio.run(run)
                if repeat < 0:
                    continue  # it warmed up
                measured = results.setdefault((server.name, concurrency), Measured())
                measured.rates_tok_s.append(sum(reply.num_tokens for reply in replies) / wall_s)
                measured.replies += replies
    return results


def tables(servers: Sequence[Server], results: Results) -> str:
    """Figures, ratios, memory and start-up as Markdown."""
    headings = ("concurrency", "server", "tok/s", "TTFT p50, s", "TPOT p50, ms", "TPOT p90, ms")
    levels = dict.fromkeys(concurrency for _, concurrency in results)
    rows = [(level, server.name, *results[server.name, level].cells) for level in levels for server in servers]
    parts = [markdown_table(headings, rows, right={0, 2, 3, 4, 5})]
    first, *others = servers
    ratios = [(level, other.name, _ratio(results, first, other, level)) for level in levels for other in others]
    if ratios:
        headings = ("concurrency", f"{first.name} / other", "tok/s ratio (90 % interval)")
        parts.append(markdown_table(headings, ratios, right={0}))
    facts = [(server.name, _figure(server.ready_s, ".1f"), _figure(server.resident_mb(), ".0f")) for server in servers]
    parts.append(markdown_table(("server", "start to ready, s", "resident, MB"), facts, right={1, 2}))
    return "\n\n".join(parts)


def _ratio(results: Results, first: Server, other: Server, level: int) -> str:
    pairs = zip(results[other.name, level].rates_tok_s, results[first.name, level].rates_tok_s, strict=True)
    ratio = paired_ratio("tok_s", list(pairs))
    return f"{ratio.value:.2f} ({ratio.low:.2f} .. {ratio.high:.2f})"


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def parse_server(option: str) -> Server:
    name, separator, command = option.partition("=")
    if not separator or not name or not command:
        raise argparse.ArgumentTypeError(f"'{option}' is not NAME=COMMAND or NAME=URL")
    if not command.startswith("http") and "{port}" not in command:
        raise argparse.ArgumentTypeError(f"'{option}' does not say where {{port}} goes")
    return Server(name.strip(), command.strip())


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--server", dest="servers", action="append", type=parse_server, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="model folder whose tokenizer cuts the prompts")
    parser.add_argument("--text", type=Path, required=True, help="text that prompts are cut from")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=150)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests-per-slot", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="folder for the servers' output; a temporary one by default")
    parser.add_argument("--out", type=Path, help="file that the tables are added to")
    return parser.parse_args()


def main() -> None:
    asked = parse_options()
    servers: list[Server] = asked.servers
    bursts = [num_requests(level, asked.requests_per_slot) * (asked.repeats + 1) for level in asked.concurrency]
    tokenizer, text = Tokenizer.open(asked.tokenizer), asked.text.read_text(encoding="utf-8")
    prompts = cut_prompts(tokenizer, text, sum(bursts), asked.prompt_tokens, asked.seed)
    logs = asked.logs or Path(tempfile.mkdtemp(prefix="servers-"))
    logs.mkdir(parents=True, exist_ok=True)
    try:
        for number, server in enumerate(servers):
            server.start(logs / f"{number}.log")
        shown = tables(servers, measure(servers, asked, prompts))
    finally:
        for server in servers:
            server.stop()
    machine = ", ".join(f"{name} {value}" for name, value in machine_facts().items())
    commands = "\n".join(f"- {server.name}: `{server.command}`" for server in servers)
    shown = f"{utc_now()}; {machine}; {asked.prompt_tokens} + {asked.new_tokens} tokens\n\n{commands}\n\n{shown}\n"
    print(shown)
    if asked.out is not None:
        with asked.out.open("a", encoding="utf-8") as file:
            file.write(shown + "\n")


if __name__ == "__main__":
    main()
