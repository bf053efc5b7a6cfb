from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantpipe.errors import RecipeError
from quantpipe.formats.scheme import w4a16, weight_only
from quantpipe.quantize.targets.allocate import Allocation, Budget, LinearSet, allocate, joined

LOW, HIGH = w4a16(64), weight_only(8, None)


def linear_set(name: str, kl: float, num_out: int = 64, num_in: int = 128) -> LinearSet:
    return LinearSet({name: (num_out, num_in)}, LOW, torch.bfloat16, kl)


@st.composite
def linear_sets(draw: st.DrawFn) -> list[LinearSet]:
    sizes = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 8), st.floats(0, 1)), min_size=1, max_size=12))
    return [linear_set(f"layers.{i}.o", kl, rows, 64 * groups) for i, (rows, groups, kl) in enumerate(sizes)]


def bits_between(sets: list[LinearSet], share: float) -> Budget:
    """A budget that lies ``share`` of the way from nothing upgraded to everything upgraded."""
    low, high = (sum(part.stored_bits(scheme) for part in sets) for scheme in (LOW, HIGH))
    return Budget(max_bytes=-(-low // 8) + int(share * (high // 8 - -(-low // 8))))


def taken_bits(sets: list[LinearSet], allocation: Allocation) -> int:
    return sum(part.stored_bits(allocation.schemes[next(iter(part.shapes))]) for part in sets)


@given(linear_sets(), st.floats(0, 1))
def test_budget_is_kept_and_used_up(sets: list[LinearSet], share: float) -> None:
    budget = bits_between(sets, share)
    allocation = allocate(sets, HIGH, budget)
    assert budget.max_bytes is not None
    left = 8 * budget.max_bytes - taken_bits(sets, allocation)
    assert left >= 0
    assert allocation.total_bits == taken_bits(sets, allocation)
    for part, choice in zip(sets, allocation.choices, strict=True):
        if not choice.is_upgraded:
            assert part.stored_bits(HIGH) - part.stored_bits(LOW) > left, "it would still have fitted"


@given(linear_sets(), st.floats(0, 1), st.randoms(use_true_random=False))
def test_order_of_the_sets_does_not_matter(sets: list[LinearSet], share: float, random: object) -> None:
    budget = bits_between(sets, share)
    shuffled = list(sets)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert allocate(shuffled, HIGH, budget).schemes == allocate(sets, HIGH, budget).schemes


@given(linear_sets(), st.floats(0, 1))
def test_no_passed_over_set_of_equal_size_was_more_sensitive(sets: list[LinearSet], share: float) -> None:
    choices = allocate(sets, HIGH, bits_between(sets, share)).choices
    for part, choice in zip(sets, choices, strict=True):
        for other, other_choice in zip(sets, choices, strict=True):
            if choice.is_upgraded and not other_choice.is_upgraded and part.num_weights == other.num_weights:
                assert list(part.shapes.values()) != list(other.shapes.values()) or part.kl >= other.kl


@given(linear_sets())
def test_extreme_budgets_leave_or_upgrade_everything(sets: list[LinearSet]) -> None:
    least, most = (Budget(max_bytes=-(-sum(part.stored_bits(s) for part in sets) // 8)) for s in (LOW, HIGH))
    assert set(allocate(sets, HIGH, least).schemes.values()) == {LOW}
    assert set(allocate(sets, HIGH, most).schemes.values()) == {HIGH}


def test_fused_sets_are_upgraded_whole() -> None:
    fused = LinearSet(dict.fromkeys(("q", "k", "v"), (64, 128)), LOW, torch.bfloat16, kl=3.0)
    allocation = allocate([fused, linear_set("o", 0.1)], HIGH, Budget(average_bits=7.5))
    assert {name: scheme.bits for name, scheme in allocation.schemes.items()} == {"q": 8, "k": 8, "v": 8, "o": 4}


def test_divergence_is_weighed_against_size() -> None:
    large, small = linear_set("large", 0.4, 256), linear_set("small", 0.3, 64)
    allocation = allocate([large, small], HIGH, Budget(average_bits=5.5))
    assert [choice.is_upgraded for choice in allocation.choices] == [False, True]


def test_a_set_that_no_longer_fits_is_passed_over_for_a_smaller_one() -> None:
    sets = [linear_set("first", 9.0, 64), linear_set("too_large", 8.0, 128), linear_set("small", 0.1, 16)]
    budget = Budget(max_bytes=(sum(p.stored_bits(LOW) for p in sets) + 80 * 128 * 4) // 8)
    allocation = allocate(sets, HIGH, budget)
    assert [choice.is_upgraded for choice in allocation.choices] == [True, False, True]


def test_sets_of_equal_merit_go_in_order_of_name() -> None:
    sets = [linear_set(name, 0.5) for name in ("b", "c", "a")]
    schemes = allocate(sets, HIGH, Budget(average_bits=6.0)).schemes
    assert [name for name in ("a", "b", "c") if schemes[name] == HIGH] == ["a"]


def test_scales_count_towards_the_budget() -> None:
    allocation = allocate([linear_set("o", 1.0)], HIGH, Budget(average_bits=5.0))
    # 4 bits and one bfloat16 scale for 64 weights
    assert allocation.average_bits == 4.25
    assert allocation.choices[0].bits_per_weight == 4.25


def test_fixed_sets_count_but_are_never_changed() -> None:
    head = replace(linear_set("lm_head", 0.0, 512), scheme=HIGH)
    sets = [linear_set("a", 1.0), linear_set("b", 0.5)]
    allocation = allocate(sets, HIGH, Budget(max_bytes=(head.stored_bits(HIGH) + 64 * 128 * 13) // 8), fixed=[head])
    assert [choice.is_upgraded for choice in allocation.choices] == [True, False, False]
    assert allocation.schemes["lm_head"] == HIGH


@pytest.mark.parametrize(
    ("budget", "named"),
    [
        (Budget(average_bits=4.0), "average_bits: 4.0 is too little"),
        (Budget(average_bits=9.0), "average_bits: 9.0 is more than"),
        (Budget(max_bytes=100), "max_bytes: 100 is too little"),
        (Budget(max_bytes=10**9), "max_bytes: 1,000,000,000 is more than"),
    ],
)
def test_budget_that_cannot_be_met_names_the_legal_range(budget: Budget, named: str) -> None:
    with pytest.raises(RecipeError, match=named) as caught:
        allocate([linear_set("a", 1.0), linear_set("b", 0.5)], HIGH, budget)
    legal = str(caught.value).rpartition(" is ")[2]
    assert legal in ("4.25 to 8.125 bits", "8,704 to 16,640 bytes")


@pytest.mark.parametrize("bits", [4.25, 8.125])
def test_both_ends_of_the_legal_range_are_legal(bits: float) -> None:
    allocation = allocate([linear_set("a", 1.0), linear_set("b", 0.5)], HIGH, Budget(average_bits=bits))
    assert allocation.average_bits == bits


def test_group_size_that_does_not_fit_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"128 does not divide the 192 input features of a;"):
        allocate([linear_set("a", 1.0, num_in=192)], weight_only(8, 128), Budget(average_bits=5.0))


def test_scheme_that_takes_no_more_room_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"w4a16 g128 takes no more room than w4a16 g64, which a has already"):
        allocate([linear_set("a", 1.0)], w4a16(128), Budget(average_bits=4.25))


def test_sets_that_belong_together_become_one_and_their_divergence_adds_up() -> None:
    sets = [linear_set(name, kl) for name, kl in (("0.experts", 1.0), ("0.o", 0.5), ("1.experts", 2.0), ("1.o", 0.25))]
    found = joined(sets, {"0.experts", "1.experts", "1.experts.more"})
    assert [(list(part.shapes), part.kl) for part in found] == [
        (["0.experts", "1.experts"], 3.0),
        (["0.o"], 0.5),
        (["1.o"], 0.25),
    ]
    assert joined(sets, set()) == sets
