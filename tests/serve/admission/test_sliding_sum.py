"""Sums of the last seconds, against adding up by hand."""

import math

from hypothesis import given
from hypothesis import strategies as st

from quantpipe.serve.admission.sliding_sum import SlidingSum

steps = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 9)), min_size=1, max_size=40)


@given(steps, st.integers(1, 20))
def test_total_covers_the_window_and_at_most_a_second_more(given_steps: list[tuple[float, int]], window_s: int) -> None:
    now_s = 0.0
    added: list[tuple[float, int]] = []
    total = SlidingSum(window_s, lambda: now_s)
    for wait_s, amount in given_steps:
        now_s += wait_s
        total.add(amount)
        added.append((now_s, amount))
        inside = sum(own for when_s, own in added if when_s > now_s - window_s)
        at_most = sum(own for when_s, own in added if when_s >= now_s - window_s - 1)
        assert inside <= total.total <= at_most


@given(steps, st.integers(1, 30))
def test_after_the_wait_it_tells_the_sum_is_below_the_limit_and_not_long_before(
    given_steps: list[tuple[float, int]], limit: int
) -> None:
    now_s = 0.0
    total = SlidingSum(10, lambda: now_s)
    for wait_s, amount in given_steps:
        now_s += wait_s
        total.add(amount)
    wait_s = total.seconds_until_below(limit)
    assert (wait_s == 0) == (total.total < limit)
    if wait_s > 0:
        now_s = math.nextafter(now_s + wait_s, 0) - 0.001
        assert total.total >= limit
        now_s += 0.002
        assert total.total < limit
