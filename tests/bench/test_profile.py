"""The division of a step's time: what is told of its parts adds up to the whole."""

from collections.abc import Iterator
from itertools import count

import pytest

from quantpipe.bench.profile import COLUMNS, HEADINGS, REST, PhaseProfile, profile_burst, rows
from quantpipe.engine.request import FinishReason, RequestOutput, SamplingParams, StepOutput

PARTS = {"scheduler": 1.0, "qkv": 2.0, "head": 3.0, "sampling": 0.5}


class CountingEngine:
    """Each step takes 10 seconds, ``PARTS`` of them known. Prompts are read one per step; then all get a token each."""

    def __init__(self, new_tokens: int) -> None:
        self.new_tokens = new_tokens
        self.num_steps = 0
        self.tokens: dict[str, int] = {}

    @property
    def has_unfinished(self) -> bool:
        return any(num < self.new_tokens for num in self.tokens.values())

    def add(self, prompt_ids: object, params: SamplingParams) -> str:
        assert params.ignore_eos and params.temperature == 0
        self.tokens[f"r{len(self.tokens)}"] = 0
        return f"r{len(self.tokens) - 1}"

    def step(self) -> list[StepOutput]:
        self.num_steps += 1
        unread = [name for name, num in self.tokens.items() if num == 0]
        served = unread[:1] or [name for name, num in self.tokens.items() if num < self.new_tokens]
        for name in served:
            self.tokens[name] += 1
        return [StepOutput(name, (1,), (), None) for name in served]

    def abort(self, request_id: str) -> None:
        self.tokens.pop(request_id, None)

    def take_output(self, request_id: str) -> RequestOutput:
        return RequestOutput(request_id, (1,), (1,) * self.new_tokens, FinishReason.LENGTH)

    def step_times_s(self) -> dict[str, float]:
        return {part: seconds * self.num_steps for part, seconds in PARTS.items()}


@pytest.fixture
def profiles() -> list[PhaseProfile]:
    engine = CountingEngine(new_tokens=4)
    ticks: Iterator[int] = count()
    return profile_burst(engine, [[1], [2], [3]], 4, lambda: 30.0 * next(ticks))


def test_steps_that_read_prompts_are_told_from_those_that_decode(profiles: list[PhaseProfile]) -> None:
    assert [(own.phase, own.concurrency, own.num_steps) for own in profiles] == [
        ("read prompts", 3, 3),
        ("decode", 3, 3),
    ]


def test_columns_add_up_to_the_time_that_passed(profiles: list[PhaseProfile]) -> None:
    for own in profiles:
        assert sum(own.columns_s.values()) == pytest.approx(own.wall_s)
        assert own.columns_s["linears"] == 6.0
        assert own.columns_s[REST] == own.wall_s - 3 * sum(PARTS.values())


def test_every_row_has_a_cell_for_every_heading(profiles: list[PhaseProfile]) -> None:
    idle = PhaseProfile("decode", 1, 0, 0.0, dict.fromkeys((*COLUMNS, REST), 0.0))
    assert {len(row) for row in rows([*profiles, idle])} == {len(HEADINGS)}
    assert [row[0] for row in rows(list(reversed(profiles)))] == ["read prompts", "decode"]


def test_no_part_is_counted_twice() -> None:
    parts = [part for column in COLUMNS.values() for part in column]
    assert len(parts) == len(set(parts))
