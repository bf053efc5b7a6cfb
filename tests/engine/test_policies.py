"""Due times: who goes first, and that nobody waits for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantpipe.engine.policies import LATE_S, OVERTAKING_S, POLICIES, PRIORITY_STEP_S, QOS_DELAY_S, remaining_s
from quantpipe.engine.request import PRIORITIES, QOS_CLASSES, QosClass, Request, SamplingParams, Sequence


def sequence(
    arrival_s: float = 0.0,
    num_prompt: int = 1,
    max_tokens: int = 16,
    expected: int = 16,
    token_s: float = 0.05,
    num_generated: int = 0,
    num_seen: int = 0,
    qos: QosClass = "standard",
    priority: int = 0,
    deadline_s: float | None = None,
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    request = Request(
        "r", (1,) * num_prompt, params, priority=priority, qos=qos, deadline_s=deadline_s, arrival_s=arrival_s
    )
    seq = Sequence(request, [1] * (num_prompt + min(num_generated, max_tokens)), num_seen_tokens=num_seen)
    seq.expected_new_tokens, seq.token_s = min(expected, max_tokens), token_s
    return seq


def sequences(arrival_s: st.SearchStrategy[float]) -> st.SearchStrategy[Sequence]:
    return st.builds(
        sequence,
        arrival_s=arrival_s,
        num_prompt=st.integers(1, 3000),
        max_tokens=st.integers(0, 3000),
        expected=st.integers(0, 3000),
        token_s=st.floats(1e-4, 3),
        num_generated=st.integers(0, 3000),
        num_seen=st.integers(0, 6000),
        qos=st.sampled_from(QOS_CLASSES),
        priority=st.sampled_from(PRIORITIES),
        deadline_s=st.none() | st.floats(1e-3, 1e6),
    )


times = st.floats(0, 5000)


@pytest.mark.parametrize("policy", POLICIES)
@given(seq=sequences(times), other=sequences(times), now_s=times)
def test_nobody_is_overtaken_by_who_arrives_long_after(
    policy: str, seq: Sequence, other: Sequence, now_s: float
) -> None:
    due_s, other_due_s = (POLICIES[policy](one, now_s) for one in (seq, other))
    assert -1e-9 <= due_s - seq.request.arrival_s <= OVERTAKING_S + 1e-9  # times are rounded
    if other.request.arrival_s >= seq.request.arrival_s + OVERTAKING_S + 1e-6:
        assert due_s < other_due_s


@pytest.mark.parametrize("policy", POLICIES)
@given(seq=sequences(times), times_s=st.lists(times, min_size=2, max_size=6).map(sorted))
def test_time_alone_never_makes_anyone_due_earlier(policy: str, seq: Sequence, times_s: list[float]) -> None:
    dues = [POLICIES[policy](seq, now_s) for now_s in times_s]
    assert dues == sorted(dues)
    assert len(set(dues)) <= 2  # once it is late, if at all


@given(seq=sequences(times), num_generated=st.integers(0, 3000), num_seen=st.integers(0, 6000))
def test_preemption_does_not_change_what_remains(seq: Sequence, num_generated: int, num_seen: int) -> None:
    remaining = remaining_s(seq)
    seq.num_computed_tokens = 0
    assert remaining_s(seq) == remaining >= 0


def test_shortest_puts_less_remaining_work_first_and_counts_prompts_less_than_outputs() -> None:
    due = POLICIES["shortest"]
    long_output, long_prompt = sequence(max_tokens=500, expected=500), sequence(num_prompt=500, max_tokens=10)
    nearly_done = sequence(max_tokens=500, expected=500, num_generated=498)
    assert due(nearly_done, 0.0) < due(long_prompt, 0.0) < due(long_output, 0.0)


def test_output_longer_than_expected_is_expected_to_double_but_not_beyond_max_tokens() -> None:
    def remaining_tokens(num_generated: int) -> float:
        return remaining_s(sequence(max_tokens=100, expected=20, num_generated=num_generated, num_seen=1, token_s=1.0))

    assert [remaining_tokens(num) for num in (0, 19, 20, 30, 80, 99)] == [20, 1, 20, 30, 20, 1]


def test_deadline_puts_least_slack_first_and_who_has_missed_it_last() -> None:
    due = POLICIES["deadline"]
    tight, loose = sequence(deadline_s=2.0), sequence(deadline_s=20.0)
    long = sequence(deadline_s=20.0, max_tokens=390, expected=390)
    hasty, none = sequence(deadline_s=0.5), sequence()
    everyone = [none, loose, long, tight, hasty]
    assert sorted(everyone, key=lambda seq: due(seq, 0.4)) == [hasty, long, tight, loose, none]
    assert sorted(everyone, key=lambda seq: due(seq, 0.6)) == [long, tight, loose, none, hasty]
    assert due(tight, 5.0) == due(tight, 0.0) + remaining_s(tight) + LATE_S


def test_deadline_orders_decodes_by_what_is_left_to_generate() -> None:
    ahead = sequence(deadline_s=9.0, max_tokens=100, expected=100, num_generated=90)
    behind = sequence(deadline_s=9.0, max_tokens=100, expected=100, num_generated=10)
    assert POLICIES["deadline"](behind, 1.0) < POLICIES["deadline"](ahead, 1.0)


def test_lower_priority_goes_first_until_waiting_outweighs_it() -> None:
    due = POLICIES["priority"]
    assert due(sequence(priority=-1), 0.0) < due(sequence(), 0.0) < due(sequence(priority=1), 0.0)
    waited = sequence(arrival_s=0.0, priority=1)
    assert due(waited, 0.0) < due(sequence(arrival_s=PRIORITY_STEP_S + 0.1), 0.0)
    assert due(waited, 0.0) > due(sequence(arrival_s=PRIORITY_STEP_S - 0.1), 0.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_service_classes_weigh_into_every_policy(policy: str) -> None:
    dues = [POLICIES[policy](sequence(qos=qos), 0.0) for qos in ("interactive", "standard", "batch")]
    assert [due_s - dues[0] for due_s in dues] == pytest.approx(list(QOS_DELAY_S.values()))
