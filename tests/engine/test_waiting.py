"""The queue keeps the policy's order through additions, removals and the passing of time."""

from hypothesis import given
from hypothesis import strategies as st

from quantpipe.engine.policies import POLICIES
from quantpipe.engine.request import Request, SamplingParams, Sequence
from quantpipe.engine.waiting import WaitingQueue, place_of


def sequence(number: int, arrival_s: float, num_prompt: int, deadline_s: float | None = None) -> Sequence:
    request = Request("r", (1,) * num_prompt, SamplingParams(), deadline_s=deadline_s, arrival_s=arrival_s)
    return Sequence(request, [1] * num_prompt, number=number, token_s=0.1, expected_new_tokens=16)


arrivals = st.lists(
    st.tuples(st.floats(0, 100), st.integers(1, 20), st.none() | st.floats(0.5, 50)), min_size=1, max_size=20
)


@given(arrivals, st.sampled_from(list(POLICIES)), st.none() | st.integers(5, 15), st.data())
def test_head_is_always_who_is_due_first_now(
    sizes: list[tuple[float, int, float | None]], policy: str, long_prompt_tokens: int | None, data: st.DataObject
) -> None:
    queue = WaitingQueue(POLICIES[policy], long_prompt_tokens)
    waiting = [sequence(number, *size) for number, size in enumerate(sizes)]
    for seq in waiting:
        queue.push(seq, seq.request.arrival_s)
    now_s = 0.0
    while waiting:
        now_s += data.draw(st.floats(0, 40))
        takes_long = data.draw(st.booleans())
        open_to = [seq for seq in waiting if takes_long or not queue.is_long(seq)]
        expected = min(open_to, key=lambda seq: place_of(seq, POLICIES[policy], now_s), default=None)
        assert queue.head(now_s, takes_long) is expected
        leaving = expected if expected is not None and data.draw(st.booleans()) else data.draw(st.sampled_from(waiting))
        queue.remove(leaving)
        waiting.remove(leaving)
        assert leaving not in queue and len(queue) == len(waiting) and set(queue) == set(waiting)


def test_short_prompts_pass_long_ones_only_while_the_lane_is_closed() -> None:
    queue = WaitingQueue(POLICIES["fcfs"], long_prompt_tokens=10)
    long, short = sequence(0, 0.0, 11), sequence(1, 1.0, 10)
    for seq in (long, short):
        queue.push(seq, 1.0)
    assert queue.head(1.0, takes_long=True) is long
    assert queue.head(1.0, takes_long=False) is short
    queue.remove(short)
    assert queue.head(1.0, takes_long=False) is None
