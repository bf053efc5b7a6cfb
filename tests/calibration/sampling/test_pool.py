"""The pool against a plain sort of everything that was offered."""

import random

from hypothesis import given
from hypothesis import strategies as st

from quantpipe.calibration.sampling.pool import ENTRY_CHARS, Pool, ranking

ROWS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 200), st.sampled_from(["a", "b", None])), max_size=80)


def cost(num_chars: int) -> int:
    return num_chars + ENTRY_CHARS


@given(rows=ROWS, max_chars=st.integers(1, 3000), seed=st.integers(0, 9))
def test_a_pool_is_a_beginning_of_the_distinct_rows_in_rank_order(
    rows: list[tuple[int, int, str | None]], max_chars: int, seed: int
) -> None:
    chars = {rank: num_chars for rank, num_chars, _ in rows}  # rows of equal rank are equal, so of equal length
    offered = [rank for rank, _, _ in rows]
    random.Random(seed).shuffle(offered)
    pool: Pool[int] = Pool(max_chars)
    for rank in offered:
        pool.offer(rank, rank, chars[rank])
    held = [entry.rank for entry in pool.entries()]

    assert held == sorted(chars)[: len(held)]
    assert pool.limit is None or held[-1] < pool.limit <= sorted(chars)[len(held)]
    assert (pool.limit is None) == (len(held) == len(chars))
    assert sum(cost(chars[rank]) for rank in held) <= max_chars or len(held) == 1
    assert [entry.num_copies for entry in pool.entries()] == [offered.count(rank) for rank in held]
    assert (pool.num_rows, pool.num_chars) == (len(offered), sum(chars[rank] for rank in offered))


@given(rows=ROWS, max_chars=st.integers(500, 3000), max_group_chars=st.integers(1, 800))
def test_what_is_missing_below_the_limit_is_named_by_group(
    rows: list[tuple[int, int, str | None]], max_chars: int, max_group_chars: int
) -> None:
    groups = {rank: group for rank, _, group in rows}
    chars = {rank: num_chars for rank, num_chars, _ in rows}
    pool: Pool[int] = Pool(max_chars, max_group_chars)
    for rank, _, _ in rows:
        pool.offer(rank, rank, chars[rank], groups[rank])
    held = {entry.rank for entry in pool.entries()}
    complete_below = pool.limit if pool.limit is not None else max(chars, default=0) + 1

    missing = {rank for rank in chars if rank < complete_below} - held
    assert all(groups[rank] is not None for rank in missing)
    named = pool.group_limits
    assert {groups[rank] for rank in missing} == set(named)
    for group, limit in named.items():
        assert limit == min(rank for rank in missing if groups[rank] == group)
        assert all(rank < limit for rank in held if groups[rank] == group)
    for group in ("a", "b"):
        own = [cost(chars[rank]) for rank in held if groups[rank] == group]
        assert sum(own) <= max_group_chars or len(own) == 1


def test_one_loud_group_does_not_push_the_others_out() -> None:
    pool: Pool[int] = Pool(max_chars=100 * cost(10), max_group_chars=20 * cost(10))
    rng = random.Random(0)
    for i in range(20_000):
        pool.offer(rng.getrandbits(64), i, 10, "loud" if i % 200 else f"quiet {i}")
    held = pool.entries()
    assert sum(entry.group == "loud" for entry in held) == 20
    assert len(held) == 100
    assert len(pool._worst_first) < 2_000  # what was let go does not pile up


def test_ranks_follow_from_the_seed_and_the_text() -> None:
    texts = ["one", "two", "half a pair: \ud800"]
    assert [ranking(1)(text) for text in texts] == [ranking(1)(text) for text in texts]
    assert len({ranking(seed)(text) for seed in (1, 2) for text in texts}) == 6
