"""The scheduler alone, no model: budgets, order, admission, preemption."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpipe.engine.block_pool import BlockPool
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.request import Request, SamplingParams, Sequence
from quantpipe.engine.scheduler import Scheduler, Step
from quantpipe.errors import RequestError


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 4,
    budget: int = 16,
    max_scored_rows: int = 5,
    **settings: Any,
) -> Scheduler:
    config = EngineConfig(
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        **{"admission": "greedy"} | settings,
    )
    return Scheduler(BlockPool(num_blocks), config, max_scored_rows)


def make_seq(num_prompt: int, max_tokens: int = 1, is_scored: bool = False, **order: Any) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=0 if is_scored else None)
    return Sequence(Request("r", tuple(range(num_prompt)), params, **order), list(range(num_prompt)))


def run(scheduler: Scheduler, step: Step) -> None:
    """Commit, give each sequence that has read everything one token, and remove those that are complete."""
    sampling = [advance.seq for advance in step.advances if advance.has_sample]
    scheduler.commit(step)
    for seq in sampling:
        seq.token_ids.append(0)
    for advance in step.advances:
        seq = advance.seq
        if advance.end >= seq.num_prompt_tokens and seq.num_generated_tokens >= seq.request.params.max_tokens:
            scheduler.remove(seq)


# Per request: the step it arrives at, prompt tokens, new tokens, whether its prompt is scored.
arrivals = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 40), st.integers(0, 20), st.booleans()), min_size=1, max_size=7
)


@settings(max_examples=150, deadline=None)
@given(arrivals, st.integers(15, 30), st.integers(1, 4), st.integers(0, 12), st.integers(1, 6))
def test_every_sequence_ends_within_budget_and_blocks(
    sizes: list[tuple[int, int, int, bool]], num_blocks: int, max_num_seqs: int, spare: int, max_scored_rows: int
) -> None:
    budget = max_num_seqs + spare
    scheduler = make_scheduler(num_blocks, 4, max_num_seqs, budget, max_scored_rows)
    arriving = [
        (arrival, make_seq(num_prompt, max_tokens, is_scored))
        for arrival, num_prompt, max_tokens, is_scored in sorted(sizes)
    ]
    everyone = [seq for _, seq in arriving]
    for time in range(2000):
        while arriving and arriving[0][0] <= time:
            scheduler.add(arriving.pop(0)[1])
        step = scheduler.schedule(0.0)
        assert step.advances or not scheduler.has_unfinished
        assert sum(advance.num_tokens for advance in step.advances) <= budget
        assert len(scheduler.running) <= max_num_seqs
        scored = [a for a in step.advances if a.seq.request.is_scored and a.start < a.seq.num_prompt_tokens]
        assert sum(a.num_logit_rows for a in scored if not a.has_sample) <= max_scored_rows
        for advance in step.advances:
            assert advance.num_tokens >= 1
            assert len(advance.seq.block_table) * 4 >= advance.end
        order = [everyone.index(seq) for seq in [*sorted(scheduler.running, key=everyone.index), *scheduler.waiting]]
        assert order == sorted(order)
        assert scheduler.pool.num_held == sum(len(seq.block_table) for seq in everyone)
        run(scheduler, step)
        if not arriving and not scheduler.has_unfinished:
            break
    assert not arriving and not scheduler.has_unfinished
    assert scheduler.pool.num_held == 0
    assert all(seq.num_generated_tokens == seq.request.params.max_tokens for seq in everyone)


@pytest.mark.parametrize("long_is_first", [True, False])
def test_decode_advances_in_every_step_while_a_long_prompt_is_read(long_is_first: bool) -> None:
    scheduler = make_scheduler(num_blocks=400, budget=16, policy="priority")
    long, short = make_seq(1000, priority=-long_is_first), make_seq(4, max_tokens=50)
    scheduler.add(short)
    run(scheduler, scheduler.schedule(0.0))
    scheduler.add(long)
    while short in scheduler.running:
        num_generated, num_read = short.num_generated_tokens, long.num_computed_tokens
        run(scheduler, scheduler.schedule(0.0))
        assert short.num_generated_tokens == num_generated + 1
        assert long.num_computed_tokens == num_read + 15
    assert long.num_computed_tokens < 1000


def test_requests_are_admitted_in_order_of_arrival_even_if_a_later_one_would_fit() -> None:
    scheduler = make_scheduler(num_blocks=8, budget=100)
    first, big, small = make_seq(20, max_tokens=4), make_seq(20), make_seq(1)
    for seq in (first, big, small):
        scheduler.add(seq)
    step = scheduler.schedule(0.0)
    assert [advance.seq for advance in step.advances] == [first]
    assert list(scheduler.waiting) == [big, small]


def test_sequence_is_not_admitted_into_the_block_that_an_older_one_needs_next() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, budget=100)
    old, young = make_seq(4, max_tokens=3), make_seq(12, max_tokens=3)
    scheduler.add(old)
    scheduler.add(young)
    while scheduler.has_unfinished:
        run(scheduler, scheduler.schedule(0.0))
    assert scheduler.num_preemptions == 0


def test_youngest_is_preempted_and_the_oldest_never() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=4, max_num_seqs=3, budget=32)
    old, young = make_seq(4, max_tokens=20), make_seq(4, max_tokens=20)
    scheduler.add(old)
    scheduler.add(young)
    while scheduler.has_unfinished:
        step = scheduler.schedule(0.0)
        if old in scheduler.running:
            assert any(advance.seq is old for advance in step.advances)
        run(scheduler, step)
    assert scheduler.num_preemptions > 0
    assert old.num_generated_tokens == young.num_generated_tokens == 20


def test_scored_prompt_asks_for_each_row_once_and_at_most_the_cap_per_step() -> None:
    scheduler = make_scheduler(budget=16, max_scored_rows=5)
    seq = make_seq(13, max_tokens=0, is_scored=True)
    scheduler.add(seq)
    chunks = []
    while scheduler.has_unfinished:
        step = scheduler.schedule(0.0)
        chunks += [(advance.start, advance.num_logit_rows) for advance in step.advances]
        run(scheduler, step)
    assert chunks == [(0, 5), (5, 5), (10, 3)]


def test_rows_before_the_scored_part_are_not_asked_for_nor_counted_against_the_cap() -> None:
    scheduler = make_scheduler(budget=16, max_scored_rows=5)
    prompt_ids = tuple(range(30))
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_from=22)
    seq = Sequence(Request("r", prompt_ids, params), list(prompt_ids))
    scheduler.add(seq)
    chunks = []
    while scheduler.has_unfinished:
        step = scheduler.schedule(0.0)
        chunks += [(advance.start, advance.num_tokens, advance.num_logit_rows) for advance in step.advances]
        run(scheduler, step)
    assert chunks == [(0, 16, 0), (16, 10, 5), (26, 4, 4)]


def test_rows_already_delivered_are_not_asked_for_again_after_preemption() -> None:
    scheduler = make_scheduler(budget=16, max_scored_rows=5)
    seq = make_seq(13, max_tokens=2, is_scored=True)
    scheduler.add(seq)
    for _ in range(2):
        run(scheduler, scheduler.schedule(0.0))
    scheduler._preempt(seq, scheduler._plan(0.0))
    [advance] = scheduler.schedule(0.0).advances
    assert (advance.start, advance.num_tokens, advance.num_logit_rows) == (0, 13, 3)


def test_prompt_without_scoring_wants_logits_only_where_it_ends() -> None:
    scheduler = make_scheduler(budget=16)
    seq = make_seq(20)
    scheduler.add(seq)
    rows = []
    while scheduler.has_unfinished:
        step = scheduler.schedule(0.0)
        rows += [advance.num_logit_rows for advance in step.advances]
        run(scheduler, step)
    assert rows == [0, 1]


def test_request_that_the_whole_pool_cannot_hold_is_refused_and_the_exact_fit_is_not() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    scheduler.add(make_seq(10, max_tokens=7))  # 16 tokens are read, the 17th is only chosen
    with pytest.raises(RequestError, match=r"17 tokens .* 5 KV blocks .* 4") as caught:
        scheduler.add(make_seq(10, max_tokens=8))
    assert caught.value.param == "prompt"
    while scheduler.has_unfinished:
        run(scheduler, scheduler.schedule(0.0))
    assert scheduler.pool.num_held == 0
