"""Dividing tokens: exact sums, nobody more than one token from the exact share."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quantpipe.calibration.quotas import Portions, divide

SHARES = st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=8)


@given(total=st.integers(0, 10**7), shares=SHARES)
def test_parts_sum_to_the_total_and_are_their_shares_rounded(total: int, shares: list[float]) -> None:
    assume(sum(shares) > 1e-3)
    parts = divide(total, shares)
    assert sum(parts) == total
    for part, share in zip(parts, shares, strict=True):
        assert abs(part - total * share / sum(shares)) < 1 + 1e-6


def test_equal_remainders_go_to_the_earlier_part() -> None:
    assert divide(5, [1, 1, 1]) == [2, 2, 1]
    assert divide(10, [0.1, 0.2, 0.7]) == [1, 2, 7]
    assert divide(3, [0, 5, 0]) == [0, 3, 0]


@pytest.mark.parametrize("shares", [[0.0, 0.0], [1.0, -1.0], []])
def test_shares_that_divide_nothing_are_refused(shares: list[float]) -> None:
    with pytest.raises(ValueError, match="cannot divide"):
        divide(10, shares)


PARTS = st.lists(st.tuples(st.floats(0, 100, allow_nan=False), st.integers(0, 400)), min_size=1, max_size=6)


@given(totals=st.lists(st.integers(0, 1000), min_size=1, max_size=3).map(sorted), parts=PARTS)
def test_what_a_dry_part_lacks_goes_to_the_others(totals: list[int], parts: list[tuple[float, int]]) -> None:
    stocks = [stock for _, stock in parts]
    portions = Portions([share for share, _ in parts], lambda i, amount: min(amount, stocks[i]))
    for total in totals:
        held = portions.grow_to(total)
        assert held == sum(portions.held) == min(total, sum(stock for share, stock in parts if share > 0))
    for i, (share, stock) in enumerate(parts):
        assert portions.held[i] <= (stock if share > 0 else 0)
        if i in portions.dry:
            assert portions.held[i] == stock


def test_while_no_part_is_dry_the_division_is_the_plain_one() -> None:
    assert filled([1, 2, 1], [90, 90, 90]) == divide(100, [1, 2, 1])
    assert filled([1, 2, 1], [90, 20, 90]) == [40, 20, 40]


def filled(shares: list[float], stocks: list[int]) -> list[int]:
    portions = Portions(shares, lambda i, amount: min(amount, stocks[i]))
    portions.grow_to(100)
    return portions.held
