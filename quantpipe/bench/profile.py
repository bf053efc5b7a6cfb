"""How the time of an engine's steps divides, for steps that read prompts and steps that only decode."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from quantpipe.bench.latency import BenchedEngine, Clock, Prompts
from quantpipe.engine.request import SamplingParams

# Columns, and the parts of a step that each adds up. What is in none of them, and what nobody measured, is the rest.
COLUMNS: dict[str, tuple[str, ...]] = {
    "scheduler": ("scheduler", "update"),
    "batch": ("batch",),
    "linears": ("qkv", "output", "gate_up", "down"),
    "attention": ("rope_kv", "attention"),
    "head": ("head",),
    "norms": ("embedding", "norm", "activation"),
    "model, undivided": ("model",),
    "sampling": ("sampling",),
}
REST = "other"


class ProfiledEngine(BenchedEngine, Protocol):
    """What tells the time of its parts as well."""

    def step_times_s(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class PhaseProfile:
    """Steps of one kind at one concurrency: how many, seconds of all of them, and of that by column."""

    phase: str
    concurrency: int
    num_steps: int
    wall_s: float
    columns_s: Mapping[str, float]

    @property
    def cells(self) -> tuple[str, ...]:
        """One row of the table: milliseconds per step, and the share of each column."""
        if not self.num_steps:
            return (self.phase, str(self.concurrency), "0", *[""] * (len(self.columns_s) + 1))
        shares = [f"{100 * seconds / self.wall_s:.1f}" for seconds in self.columns_s.values()]
        return (
            self.phase, str(self.concurrency), str(self.num_steps), f"{1e3 * self.wall_s / self.num_steps:.2f}", *shares
        )  # fmt: skip


HEADINGS = ("steps that", "concurrency", "steps", "ms per step", *(f"{name}, %" for name in (*COLUMNS, REST)))


def profile_burst(engine: ProfiledEngine, prompts: Prompts, new_tokens: int, clock: Clock) -> list[PhaseProfile]:
    """Serve all prompts together to their end: the steps until each has a token, then the others."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    request_ids: list[str] = []
    try:
        request_ids += [engine.add(prompt_ids, params) for prompt_ids in prompts]
        waiting = set(request_ids)

        def is_reading() -> bool:
            return bool(waiting) and engine.has_unfinished

        def step() -> None:
            waiting.difference_update(output.request_id for output in engine.step())

        reading = _phase("read prompts", engine, len(prompts), step, is_reading, clock)
        decoding = _phase("decode", engine, len(prompts), step, lambda: engine.has_unfinished, clock)
        for request_id in request_ids:
            engine.take_output(request_id)
        return [reading, decoding]
    finally:
        for request_id in request_ids:
            engine.abort(request_id)  # ends what an error or an interrupt left running; ignored where finished


def _phase(
    name: str,
    engine: ProfiledEngine,
    concurrency: int,
    step: Callable[[], None],
    goes_on: Callable[[], bool],
    clock: Clock,
) -> PhaseProfile:
    before, started_s, num_steps = engine.step_times_s(), clock(), 0
    while goes_on():
        step()
        num_steps += 1
    wall_s, after = clock() - started_s, engine.step_times_s()
    spent_s = {part: after[part] - before[part] for part in after}
    columns_s = {column: sum(spent_s.get(part, 0.0) for part in parts) for column, parts in COLUMNS.items()}
    return PhaseProfile(name, concurrency, num_steps, wall_s, columns_s | {REST: wall_s - sum(columns_s.values())})


def rows(profiles: Sequence[PhaseProfile]) -> list[tuple[str, ...]]:
    """The table's rows, prompts first."""
    return [profile.cells for profile in sorted(profiles, key=lambda own: own.phase != "read prompts")]
