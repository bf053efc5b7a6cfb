"""Requests as they came to a real service: a CSV of times, prompt lengths and output lengths, as Azure publishes them.

Lengths are scaled to the model at hand, and the times to the load that is wanted; their pattern stays. What was in the
prompts is not known: they are random tokens, no two alike.
"""

import csv
import dataclasses
import random
from datetime import datetime
from pathlib import Path

from simulation import Arrival

from quantpipe.engine.request import Request, SamplingParams

TOKEN_IDS = range(3, 128)  # which every vocabulary has


def read_trace(path: Path, num_requests: int, scale: float, max_model_len: int) -> list[Arrival]:
    """The first requests of a trace, all told a ``max_tokens`` as large as the longest output of any."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(num_requests), strict=False)]
    if len(rows) < num_requests:
        raise SystemExit(f"{path}: {len(rows):,} requests, {num_requests:,} wanted; ask for fewer with --num-requests")
    lengths = [(_scaled(row["ContextTokens"], scale), _scaled(row["GeneratedTokens"], scale)) for row in rows]
    max_tokens = max(num_new for _, num_new in lengths)
    rng, began = random.Random(0), _time(rows[0]["TIMESTAMP"])
    arrivals = []
    for number, (row, (num_prompt, num_new)) in enumerate(zip(rows, lengths, strict=True)):
        if num_prompt + max_tokens > max_model_len:
            raise SystemExit(f"{path}: {num_prompt:,} prompt and {max_tokens:,} new tokens; lower --scale")
        prompt_ids = tuple(rng.choice(TOKEN_IDS) for _ in range(num_prompt))
        arrival_s = (_time(row["TIMESTAMP"]) - began).total_seconds()
        request = Request(str(number), prompt_ids, SamplingParams(max_tokens=max_tokens), arrival_s=arrival_s)
        arrivals.append(Arrival(request, num_new))
    return arrivals


def at_load(arrivals: list[Arrival], capacity_s: float, load: float) -> list[Arrival]:
    """The same requests over ``capacity_s / load`` seconds, where ``capacity_s`` is what all of them take at best."""
    last_s = max(arrival.request.arrival_s for arrival in arrivals)
    factor = capacity_s / load / last_s if load else 0.0
    return [
        dataclasses.replace(
            arrival, request=dataclasses.replace(arrival.request, arrival_s=factor * arrival.request.arrival_s)
        )
        for arrival in arrivals
    ]


def describe(arrivals: list[Arrival]) -> str:
    """Lengths in one line."""
    prompts = sorted(len(arrival.request.prompt_ids) for arrival in arrivals)
    outputs = sorted(arrival.num_new for arrival in arrivals)
    middle = len(arrivals) // 2
    return (
        f"{len(arrivals)} requests; prompts of {prompts[0]} to {prompts[-1]} tokens (median {prompts[middle]}), "
        f"outputs of {outputs[0]} to {outputs[-1]} (median {outputs[middle]})"
    )


def _scaled(tokens: str, scale: float) -> int:
    return max(1, round(int(tokens) * scale))


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text[:26])  # Python knows microseconds, the trace a digit more
