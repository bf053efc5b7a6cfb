"""How requests divide: shares, users that stay, draws that a seed decides, and splits that are none."""

import pytest

from quantpipe.errors import RecipeError
from quantpipe.serve.arms.split import Draws, Split, whole

USERS = [f"user {number}" for number in range(4000)]


@pytest.mark.parametrize(
    "text", ["90", "90:10:5", "0:0", "-1:2", "a:b", "nan:1", "1:NaN", "inf:1", "", ":", "1:", "1e308:1e308"]
)
def test_what_is_no_split_is_one_line_that_shows_one(text: str) -> None:
    with pytest.raises(RecipeError, match=r"^--split: '.*90:10$") as caught:
        Split.parse(text, 2)
    assert "\n" not in str(caught.value)


def test_weights_need_not_sum_to_anything() -> None:
    assert Split.parse("90:10", 2).shares == Split.parse("9:1", 2).shares == (0.9, 0.1)
    assert Split.parse("0.5: 1.5", 2).shares == (0.25, 0.75)


@pytest.mark.parametrize(("weights", "arm"), [((1.0, 0.0), 0), ((0.0, 1.0), 1)])
def test_an_arm_of_weight_0_gets_nothing(weights: tuple[float, float], arm: int) -> None:
    split = Split(weights)
    assert {split.arm_of_user(user) for user in USERS} == {arm}
    assert {split.arm_at(place) for place in (0.0, 0.5, 1 - 2**-53, 1.0)} == {arm}
    assert whole(2) == Split((1.0, 0.0))


def test_users_divide_by_the_weights_and_otherwise_with_another_seed() -> None:
    split = Split((80, 20))
    share = sum(split.arm_of_user(user) for user in USERS) / len(USERS)
    assert 0.17 < share < 0.23  # of 4,000: five standard deviations
    moved = [user for user in USERS if Split((80, 20), seed=1).arm_of_user(user) != split.arm_of_user(user)]
    assert len(moved) > 0.2 * len(USERS)


def test_users_are_where_they_were_in_every_process() -> None:
    """Known answers: Python's own hash would differ from one process to the next."""
    assert [Split((50, 50)).arm_of_user(user) for user in USERS[:12]] == [
        1,
        0,
        1,
        1,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
    ]


def test_a_changed_weight_moves_users_one_way_only() -> None:
    before, after = Split((90, 10)), Split((60, 40))
    moves = {(before.arm_of_user(user), after.arm_of_user(user)) for user in USERS}
    assert moves == {(0, 0), (0, 1), (1, 1)}


def test_draws_follow_the_weights_and_repeat_with_their_seed() -> None:
    def drawn(seed: int) -> list[int]:
        draws = Draws(Split((3, 1), seed))
        return [draws.next() for _ in range(4000)]

    assert drawn(5) == drawn(5) != drawn(6)
    assert 0.21 < sum(drawn(5)) / 4000 < 0.29
