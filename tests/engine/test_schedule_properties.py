"""What holds in every schedule: under each policy, batching mode, admission rule, pool size and pattern of arrivals."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantpipe.engine.admission import ADMISSIONS
from quantpipe.engine.attention_window import AttentionWindow
from quantpipe.engine.batching import BATCHING_MODES
from quantpipe.engine.block_pool import BlockPool
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.policies import OVERTAKING_S, POLICIES
from quantpipe.engine.prefix_cache import PrefixCache
from quantpipe.engine.request import QOS_CLASSES, Request, SamplingParams, Sequence
from quantpipe.engine.scheduler import Scheduler, Step
from quantpipe.engine.waiting import Place, place_of
from quantpipe.errors import RequestError

MAX_SCORED_ROWS = 5


@dataclass
class Clock:
    """A simulated machine: a step takes some time, and every token in it some more."""

    now_s: float = 0.0
    step_s: float = 0.01
    token_s: float = 0.001

    def cost_s(self, num_tokens: int) -> float:
        return self.step_s + self.token_s * num_tokens


@dataclass
class Simulation:
    """A scheduler and who arrives when. Tokens are made up; ``trail`` has the time of each token of each sequence."""

    scheduler: Scheduler
    arriving: list[Sequence]
    clock: Clock = field(default_factory=Clock)
    everyone: list[Sequence] = field(default_factory=list)
    trail: dict[Sequence, list[float]] = field(default_factory=dict)
    admitted: list[Sequence] = field(default_factory=list)
    drafter: "MadeUpDrafter | None" = None

    @property
    def is_over(self) -> bool:
        return not (self.arriving or self.scheduler.has_unfinished)

    def let_arrive(self) -> None:
        if not self.scheduler.has_unfinished and self.arriving:
            self.clock.now_s = max(self.clock.now_s, self.arriving[0].request.arrival_s)
        while self.arriving and self.arriving[0].request.arrival_s <= self.clock.now_s:
            seq = self.arriving.pop(0)
            self.everyone.append(seq)
            self.scheduler.add(seq)

    def step(self, check: Callable[[Step], None] = lambda step: None) -> Step:
        running = set(self.scheduler.running)
        step = self.scheduler.schedule(self.clock.now_s)
        check(step)
        self.admitted += [seq for seq in self.scheduler.running if seq not in running]
        self.clock.now_s += step.wait_s or self.clock.cost_s(sum(advance.num_tokens for advance in step.advances))
        for advance in step.advances:
            if advance.draft_ids and self.drafter is not None:
                num_right = sum(self.drafter.rng.random() < self.drafter.right_frac for _ in advance.draft_ids)
                advance.seq.token_ids += (*advance.draft_ids[:num_right], 1)
        self.scheduler.commit(step, (), self.clock.now_s)
        for advance in step.advances:
            self._take_token(advance.seq, has_taken=bool(advance.draft_ids))
        return step

    def _take_token(self, seq: Sequence, has_taken: bool) -> None:
        if has_taken:
            self.trail.setdefault(seq, []).append(self.clock.now_s)
            self._end(seq)
        elif seq.num_uncomputed_tokens == 0 and seq.request.params.max_tokens > 0:
            forks = [fork_of(seq, index) for index in range(1, 1 + seq.num_pending_forks)]
            for fork in forks:
                self.scheduler.fork(seq, fork)
            seq.num_pending_forks = 0
            for one in [seq, *forks]:
                one.token_ids.append(one.num_tokens % 3 + one.index)
                self.trail.setdefault(one, []).append(self.clock.now_s)
                self._end(one)
            self.everyone += forks
        else:
            self._end(seq)

    def _end(self, seq: Sequence) -> None:
        is_read = seq.num_computed_tokens >= seq.num_prompt_tokens
        if is_read and seq.num_generated_tokens >= seq.request.params.max_tokens:
            self.scheduler.remove(seq, is_complete=True)


class MadeUpDrafter:
    """Guesses anything, of which ``right_frac`` is called right."""

    def __init__(self, right_frac: float) -> None:
        self.right_frac = right_frac
        self.rng = Random(0)

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        return [(2,) * (num if self.right_frac == 0 else self.rng.randint(0, num)) for _, num in wanted]

    def forget(self, seq: Sequence) -> None:
        assert not seq.block_table


def fork_of(seq: Sequence, index: int) -> Sequence:
    return Sequence(seq.request, list(seq.token_ids), namespace=seq.namespace, index=index)


def sequence(
    arrival_s: float = 0.0,
    num_prompt: int = 4,
    max_tokens: int = 4,
    num_forks: int = 0,
    is_scored: bool = False,
    **order: Any,
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=0 if is_scored else None)
    prompt_ids = tuple(range(7))[:num_prompt] + (1,) * (num_prompt - 7)  # beginnings that many share
    request = Request("r", prompt_ids, params, arrival_s=arrival_s, **order)
    return Sequence(request, list(prompt_ids), num_pending_forks=num_forks if max_tokens else 0)


def simulation(
    arriving: list[Sequence],
    num_blocks: int = 400,
    has_prefix_cache: bool = True,
    drafter: MadeUpDrafter | None = None,
    form: tuple[int, int] | None = None,
    **settings: Any,
) -> Simulation:
    """``form``: the number of sinks, and the window."""
    config = EngineConfig(**{"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16} | settings)
    chunk = config.max_prefill_chunk or config.max_num_batched_tokens
    window = None
    if form is not None:  # of two layers
        window = AttentionWindow(4, *form, form[1], 2 * form[1] - 2, min(chunk, config.max_num_batched_tokens))
    pool = BlockPool(num_blocks)
    prefix_cache = PrefixCache(pool, config.block_size) if has_prefix_cache else None
    scheduler = Scheduler(pool, config, MAX_SCORED_ROWS, prefix_cache, drafter, window)
    return Simulation(scheduler, sorted(arriving, key=lambda seq: seq.request.arrival_s), drafter=drafter)


arrivals = st.lists(
    st.builds(
        sequence,
        arrival_s=st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0, 1.02, 5.0]),
        num_prompt=st.integers(1, 40),
        max_tokens=st.integers(0, 20),
        num_forks=st.sampled_from([0, 0, 1, 2]),
        is_scored=st.booleans(),
        priority=st.integers(-20, 19),
        qos=st.sampled_from(QOS_CLASSES),
        deadline_s=st.none() | st.sampled_from([0.01, 0.3, 2.0]),
    ),
    min_size=1,
    max_size=7,
)
all_settings = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(15, 30),
        "has_prefix_cache": st.booleans(),
        "policy": st.sampled_from(list(POLICIES)),
        "batching": st.sampled_from(BATCHING_MODES),
        "admission": st.sampled_from(list(ADMISSIONS)),
        "max_num_seqs": st.integers(3, 5),
        "max_num_batched_tokens": st.integers(5, 20),
        "max_prefill_chunk": st.none() | st.integers(1, 10),
        "max_long_prefills": st.none() | st.integers(1, 2),
        "long_prompt_tokens": st.integers(5, 25),
        "target_step_s": st.none() | st.sampled_from([0.011, 0.018]),
        "static_wait_s": st.sampled_from([0.0, 0.5]),
        "form": st.none() | st.tuples(st.integers(0, 6), st.integers(4, 11)),
        "drafter": st.none() | st.sampled_from([0.0, 0.6, 1.0]).map(MadeUpDrafter),
        "num_draft_tokens": st.integers(1, 9),
    }
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arrivals, all_settings)
def test_every_sequence_ends_and_no_rule_is_broken_on_the_way(arriving: list[Sequence], chosen: dict[str, Any]) -> None:
    run = simulation(arriving, **chosen)
    scheduler = run.scheduler
    for _ in range(3000):
        run.let_arrive()
        first = min([place_of(seq, scheduler._policy, run.clock.now_s) for seq in scheduler.running], default=None)

        def check(step: Step, first: Place | None = first) -> None:
            check_budgets(scheduler, step)
            check_blocks(scheduler, step, run.everyone)
            assert first is None or any(advance.seq is first[-1] for advance in step.advances), "the first must advance"
            assert step.advances or step.wait_s > 0 or not scheduler.has_unfinished

        run.step(check)
        if run.is_over:
            break
    assert run.is_over
    assert scheduler.pool.num_held == 0
    assert all(seq.num_generated_tokens == seq.request.params.max_tokens for seq in run.everyone)


def check_budgets(scheduler: Scheduler, step: Step) -> None:
    config = scheduler.config
    assert sum(advance.num_tokens for advance in step.advances) <= config.max_num_batched_tokens
    assert sum(1 + seq.num_pending_forks for seq in scheduler.running) <= config.max_num_seqs
    num_own = [advance.num_tokens - len(advance.draft_ids) for advance in step.advances]
    assert all(1 <= num <= (config.max_prefill_chunk or 99) for num in num_own)
    guessing = [(num, advance) for num, advance in zip(num_own, step.advances, strict=True) if advance.draft_ids]
    assert all(num == 1 and advance.start == advance.seq.num_tokens - 1 for num, advance in guessing)
    assert sum(len(advance.draft_ids) for advance in step.advances) <= MAX_SCORED_ROWS
    scored = [a for a in step.advances if a.seq.request.is_scored and a.start < a.seq.num_prompt_tokens]
    assert sum(a.num_logit_rows for a in scored if not a.has_sample) <= MAX_SCORED_ROWS
    if config.max_long_prefills is not None:
        reading = [seq for seq in scheduler.running if seq.num_computed_tokens < seq.num_prompt_tokens]
        assert sum(seq.num_prompt_tokens > config.long_prompt_tokens for seq in reading) <= config.max_long_prefills


def check_blocks(scheduler: Scheduler, step: Step, everyone: list[Sequence]) -> None:
    pool, block_size = scheduler.pool, scheduler.config.block_size
    assert pool.num_free + pool.num_cached + pool.num_held == pool.num_blocks
    assert pool.num_held == len({block for seq in everyone for block in seq.block_table})
    assert all((seq in scheduler.running) == bool(seq.block_table) for seq in everyone)
    for advance in step.advances:
        num_dropped = advance.seq.num_dropped_blocks
        first, end = advance.start // block_size - num_dropped, -(-advance.end // block_size) - num_dropped
        written = advance.seq.block_table[first:end]
        assert len(written) * block_size >= advance.num_tokens
        assert not any(pool.must_copy(block) for block in written)
    if step.advances and scheduler._window.is_bounded:
        num_guesses = max(len(advance.draft_ids) for advance in step.advances)
        most = scheduler._window.most_blocks(None) + -(-num_guesses // block_size)
        assert all(len(seq.block_table) <= most for seq in everyone)
    destinations = [destination for _, destination in step.copies]
    assert len(destinations) == len(set(destinations))


@settings(max_examples=60, deadline=None)
@given(arrivals, all_settings)
def test_wrong_guesses_change_nobodys_schedule(arriving: list[Sequence], chosen: dict[str, Any]) -> None:
    """Where every guess is wrong, each step is what it would be without: order, tokens, blocks and preemptions."""
    chosen |= {"has_prefix_cache": False, "target_step_s": None, "num_blocks": 15, "admission": "greedy"}
    twins = [deepcopy(seq) for seq in arriving]
    plain = simulation(arriving, **chosen | {"drafter": None})
    guessing = simulation(twins, **chosen | {"drafter": MadeUpDrafter(0.0)})
    for run in (plain, guessing):
        run.clock.token_s = 0.0
    while not plain.is_over:
        steps = []
        for run in (plain, guessing):
            run.let_arrive()
            steps.append(run.step())
        own, other = (
            [(a.seq.number, a.seq.index, a.start, a.num_tokens - len(a.draft_ids)) for a in step.advances]
            for step in steps
        )
        assert own == other
        assert len(steps[0].copies) == len(steps[1].copies)
        assert plain.scheduler.num_preemptions == guessing.scheduler.num_preemptions
    assert guessing.is_over


@settings(max_examples=60, deadline=None)
@given(
    arrivals,
    st.integers(15, 30),
    st.booleans(),
    st.sampled_from(list(POLICIES)),
    st.none() | st.tuples(st.integers(0, 6), st.integers(4, 11)),
)
def test_reserving_admission_never_preempts(
    arriving: list[Sequence], num_blocks: int, has_prefix_cache: bool, policy: str, form: tuple[int, int] | None
) -> None:
    for seq in arriving:
        seq.num_pending_forks = 0  # the forks of one request may exceed the pool together, and then take turns
    run = simulation(arriving, num_blocks, has_prefix_cache, form=form, policy=policy, admission="reserve")
    while not run.is_over:
        run.let_arrive()
        run.step()
    assert run.scheduler.num_preemptions == 0


# Whom each policy puts last, and who it puts first instead, for as long as such arrive.
UNFAVOURED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fcfs": ({"qos": "batch"}, {"qos": "interactive"}),
    "priority": ({"priority": 19, "qos": "batch"}, {"priority": -20, "qos": "interactive"}),
    "shortest": ({"max_tokens": 1500, "qos": "batch"}, {"qos": "interactive"}),
    "deadline": ({"deadline_s": 1e6, "qos": "batch"}, {"deadline_s": 100.0, "qos": "interactive"}),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_unfavoured_sequence_runs_though_favoured_ones_never_cease_to_arrive(policy: str) -> None:
    """As many arrive as can be served: without credit for its age it would wait for ever."""
    unfavoured, favoured = UNFAVOURED[policy]
    late = sequence(arrival_s=1.0, **unfavoured)
    others = [sequence(arrival_s=2.5 * number, **favoured) for number in range(400)]
    run = simulation([late, *others], policy=policy, max_num_seqs=1)
    run.clock = Clock(step_s=0.8, token_s=0.0)  # a favoured one takes 4 steps: the queue grows without end
    while late not in run.admitted:
        run.let_arrive()
        run.step()
    overtakers = run.admitted[run.admitted.index(others[0]) + 1 : -1]
    assert 3 <= len(overtakers) < len(others) - 10
    assert max(seq.request.arrival_s for seq in overtakers) < late.request.arrival_s + OVERTAKING_S


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("urgency", [-20, 19])
def test_decode_behind_a_prompt_of_4k_waits_two_chunks_at_most(policy: str, urgency: int) -> None:
    stream = sequence(max_tokens=60)
    prompt = sequence(arrival_s=0.15, num_prompt=4000, priority=urgency, deadline_s=9.0 if urgency < 0 else None)
    run = simulation([stream, prompt], 4000, policy=policy, max_num_batched_tokens=512)
    while not run.is_over:
        run.let_arrive()
        run.step()
    times = run.trail[stream]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert max(gaps) > run.clock.cost_s(256), "the prompt was read in between"
    assert max(gaps) <= 2 * run.clock.cost_s(512)


def test_cap_on_chunks_shortens_the_gap_and_shares_the_budget() -> None:
    stream, prompts = sequence(max_tokens=60), [sequence(arrival_s=0.15, num_prompt=1000) for _ in range(2)]
    run = simulation([stream, *prompts], 4000, max_num_batched_tokens=512, max_prefill_chunk=100)
    largest, together = 0, 0
    while not run.is_over:
        run.let_arrive()
        reading = {a.seq: a.num_tokens for a in run.step().advances if a.seq is not stream}
        largest, together = max([largest, *reading.values()]), max(together, len(reading))
    assert (largest, together) == (100, 2)
    times = run.trail[stream]
    assert max(later - earlier for earlier, later in pairwise(times)) <= run.clock.cost_s(201) + 1e-9


def test_short_prompts_pass_long_ones_that_wait_for_their_lane() -> None:
    longs = [sequence(num_prompt=200) for _ in range(3)]
    shorts = [sequence(arrival_s=0.001, num_prompt=8) for _ in range(3)]

    def last_short_token_s(max_long_prefills: int | None) -> float:
        arriving = [sequence(seq.request.arrival_s, seq.num_prompt_tokens) for seq in (*longs, *shorts)]
        run = simulation(
            arriving,
            has_prefix_cache=False,
            max_long_prefills=max_long_prefills,
            long_prompt_tokens=100,
            max_prefill_chunk=8,
        )
        while not run.is_over:
            run.let_arrive()
            run.step()
        return max(run.trail[seq][-1] for seq in arriving if seq.num_prompt_tokens == 8)

    assert last_short_token_s(1) < 0.4 * last_short_token_s(None)


def test_batch_limit_keeps_steps_near_their_target() -> None:
    arriving = [sequence(num_prompt=300, max_tokens=3) for _ in range(40)]
    run = simulation(
        arriving, 4000, has_prefix_cache=False, max_num_seqs=8, max_num_batched_tokens=512, target_step_s=0.1
    )
    steps_s = []
    while not run.is_over:
        run.let_arrive()
        started_s = run.clock.now_s
        run.step()
        steps_s.append(run.clock.now_s - started_s)
    assert steps_s[0] > 0.5
    assert max(steps_s[20:]) < 0.13
    assert sum(steps_s[20:]) / len(steps_s[20:]) > 0.06


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("batching", BATCHING_MODES)
def test_what_can_never_fit_is_refused_at_once_and_others_go_on(policy: str, admission: str, batching: str) -> None:
    run = simulation([], num_blocks=4, policy=policy, admission=admission, batching=batching)
    run.arriving = [sequence(num_prompt=10, max_tokens=7), sequence(num_prompt=3)]
    with pytest.raises(RequestError) as caught:
        run.scheduler.add(sequence(num_prompt=10, max_tokens=8))
    assert caught.value.param == "prompt"
    assert not run.scheduler.has_unfinished
    for _ in range(100):
        run.let_arrive()
        run.step()
    assert run.is_over and all(seq.num_generated_tokens for seq in run.everyone)


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_places_in_a_batch_stay_empty_until_all_of_it_has_ended(mode: str) -> None:
    arriving = [sequence(max_tokens=3 + 5 * (number % 2)) for number in range(6)]
    run = simulation(arriving, batching=mode, max_num_seqs=3, max_num_batched_tokens=8)
    batches: list[set[Sequence]] = [set()]
    while not run.is_over:
        run.let_arrive()
        had_run = bool(run.scheduler.running)
        run.step()
        if not had_run:
            batches.append(set())
        batches[-1] |= set(run.admitted) - set().union(*batches)
    assert [len(batch) for batch in batches] == [0, 3, 3]


def test_static_batch_waits_for_more_but_not_for_ever() -> None:
    run = simulation([sequence(), sequence(arrival_s=0.2)], batching="static", static_wait_s=0.5)
    run.let_arrive()
    step = run.scheduler.schedule(0.0)
    assert (step.advances, step.wait_s) == ((), 0.5)
    while not run.is_over:
        run.let_arrive()
        run.step()
    first_s = min(times[0] for times in run.trail.values())
    assert first_s > 0.5 and len(run.admitted) == 2


def test_forks_write_into_blocks_of_their_own_and_the_last_needs_no_copy() -> None:
    run = simulation([sequence(num_prompt=6, max_tokens=4, num_forks=2)], admission="greedy")
    copies = []
    while not run.is_over:
        run.let_arrive()
        copies.append(run.step().copies)
    assert [len(made) for made in copies] == [0, 2, 0, 0]
    assert all(source == 1 for source, _ in copies[1])
