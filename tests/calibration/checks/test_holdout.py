from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantpipe.calibration.checks.holdout import group_key, holdout_key, is_held_out

FRACS = st.floats(0.0, 1.0)
ROWS = st.lists(st.tuples(st.sampled_from(["c1", "c2", "C1", " c3 ", "卡4"]), st.text(max_size=20)), max_size=40)


@given(ROWS, st.text(max_size=8), FRACS)
def test_no_group_is_on_both_sides(rows: list[tuple[str, str]], salt: str, frac: float) -> None:
    sides = defaultdict(set)
    for group, text in rows:
        sides[group.strip()].add(is_held_out(holdout_key(group, text), salt, frac))
    assert all(len(side) == 1 for side in sides.values())


@given(st.text(max_size=30), st.text(max_size=8), FRACS)
def test_rows_without_group_that_differ_in_case_or_space_are_on_one_side(text: str, salt: str, frac: float) -> None:
    spaced = holdout_key(None, f"  {text}\n")
    assert is_held_out(spaced, salt, frac) == is_held_out(holdout_key("", text), salt, frac)


@given(st.text(max_size=30), st.text(max_size=8), FRACS, FRACS)
def test_larger_share_holds_out_the_same_keys_and_more(key: str, salt: str, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert is_held_out(key, salt, large) or not is_held_out(key, salt, small)


@given(st.text(max_size=30), st.text(max_size=8))
def test_nothing_at_zero_and_everything_at_one(key: str, salt: str) -> None:
    assert not is_held_out(key, salt, 0.0)
    assert is_held_out(key, salt, 1.0)


def test_share_of_many_keys_is_about_the_one_asked_for() -> None:
    num_held_out = sum(is_held_out(holdout_key(f"customer {i}", ""), "salt", 0.1) for i in range(10_000))
    assert 870 <= num_held_out <= 1130  # 1,000 and over four standard deviations of 30; the hash is fixed


def test_another_salt_splits_anew() -> None:
    keys = [holdout_key(str(i), "") for i in range(1000)]
    both = sum(is_held_out(key, "a", 0.5) and is_held_out(key, "b", 0.5) for key in keys)
    assert 190 <= both <= 310  # independent halves share a quarter


def test_split_is_the_same_in_every_version() -> None:
    held_out = [i for i in range(40) if is_held_out(holdout_key(f"customer {i}", ""), "", 0.2)]
    assert held_out == [8, 10, 14, 19, 20, 30, 31, 34, 35, 38]


def test_group_is_never_mistaken_for_a_text() -> None:
    assert holdout_key("hello", "x") != holdout_key(None, "hello")


def test_group_of_white_space_is_none() -> None:
    assert group_key("  ") is None
    assert group_key(" 17 ") == "17"


@pytest.mark.parametrize("frac", [-0.1, 1.5, float("nan")])
def test_share_outside_zero_to_one_is_refused(frac: float) -> None:
    with pytest.raises(ValueError, match="allowed: 0 to 1"):
        is_held_out("key", "", frac)
