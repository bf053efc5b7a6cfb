"""Dividing tokens: exact sums, nobody more than one token from the exact share."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quantpipe.calibration.sampling.quotas import LEAST_TOKENS, Portions, cut, divide, join_small

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


@given(sizes=st.lists(st.integers(1, 40), max_size=12), total=st.integers(0, 300))
def test_a_row_is_cut_to_no_less_than_makes_sense_and_the_sum_is_exact(sizes: list[int], total: int) -> None:
    taken = cut(sizes, total)
    assert sum(taken) == min(total, sum(sizes))
    is_cut = [num < size for num, size in zip(taken, sizes, strict=False)]
    assert sum(is_cut) <= 2
    if len(taken) > 1 and max(sizes[: len(taken) - 1]) >= 2 * LEAST_TOKENS:
        assert all(num >= LEAST_TOKENS for num, short in zip(taken, is_cut, strict=True) if short)
    if len(taken) > 1 and max(sizes[: len(taken) - 1]) > 2:
        assert all(num > 1 for num, short in zip(taken, is_cut, strict=True) if short)


def test_what_a_cut_row_lacks_comes_from_the_nearest_that_can_give_it() -> None:
    assert cut([20, 20, 20], 60) == [20, 20, 20]
    assert cut([20, 20, 20], 50) == [20, 20, 10]
    assert cut([20, 20, 20], 41) == [20, 13, 8]
    assert cut([20, 10, 20], 31) == [13, 10, 8]
    assert cut([4, 4, 4], 9) == [4, 3, 2]
    assert cut([20, 5, 5], 25) == [20, 5]


@given(parts=st.lists(st.tuples(st.integers(0, 30), st.sampled_from([0, 0, 9])), min_size=1, max_size=6))
def test_small_amounts_are_joined_to_the_largest(parts: list[tuple[int, int]]) -> None:
    amounts, held = [amount for amount, _ in parts], [each for _, each in parts]
    joined = join_small(amounts, held, LEAST_TOKENS)
    assert sum(joined) == sum(amounts)
    small = [amount for amount, each in zip(joined, held, strict=True) if not each and 0 < amount < LEAST_TOKENS]
    assert small in ([], [sum(amounts)])
    assert join_small(joined, held, LEAST_TOKENS) == joined


def test_parts_that_grow_get_no_small_first_amount() -> None:
    stocks = [100, 100, 40]
    portions = Portions([1, 0.05, 1], lambda i, amount: min(amount, stocks[i]), least=8)
    assert (portions.grow_to(60), portions.held) == (60, [31, 0, 29])
    assert (portions.grow_to(150), portions.held) == (150, [100, 10, 40])


def filled(shares: list[float], stocks: list[int]) -> list[int]:
    portions = Portions(shares, lambda i, amount: min(amount, stocks[i]))
    portions.grow_to(100)
    return portions.held
