import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpipe.calibration.checks.near_duplicates import NearDuplicates, jaccard, lsh_bands, shingles
from quantpipe.calibration.text.words import normalised

WORDS = [f"word{i}" for i in range(12)]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=30).map(" ".join)


def similarity(left: str, right: str) -> float:
    """Jaccard over runs of three words, written out plainly."""

    def runs(text: str) -> set[tuple[str, ...]]:
        of = normalised(text).split(" ")
        return {tuple(of[i : i + 3]) for i in range(len(of) - 2)} or {tuple(of)}

    return len(runs(left) & runs(right)) / len(runs(left) | runs(right))


@given(TEXTS, TEXTS)
def test_similarity_is_that_of_runs_of_three_words(left: str, right: str) -> None:
    assert jaccard(shingles(left), shingles(right)) == similarity(left, right)


@settings(max_examples=50, deadline=None)
@given(st.lists(TEXTS, max_size=25), st.sampled_from([0.3, 0.5, 0.8, 1.0]))
def test_kept_texts_are_those_unlike_all_kept_before(texts: list[str], threshold: float) -> None:
    duplicates, kept = NearDuplicates(threshold), list[str]()
    for text in texts:
        is_new = duplicates.is_new(text)
        assert is_new == all(similarity(text, other) < threshold for other in kept)
        if is_new:
            kept.append(text)


@pytest.mark.parametrize("threshold", [0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0])
def test_bands_find_a_pair_at_the_threshold(threshold: float) -> None:
    num_bands, num_rows = lsh_bands(threshold)
    assert num_bands >= 2
    assert 1 - (1 - threshold**num_rows) ** num_bands >= 0.999


def test_planted_near_duplicates_are_all_found() -> None:
    generator = random.Random(5)
    texts = [
        " ".join(generator.choice("abcdefghij") * 3 + str(generator.randrange(999)) for _ in range(60))
        for _ in range(200)
    ]
    duplicates = NearDuplicates(0.8)
    assert all(duplicates.is_new(text) for text in texts)
    for text in texts:
        changed = text.split()
        changed[generator.randrange(60)] = "changed"
        assert not duplicates.is_new(" ".join(changed).upper())  # 55 to 57 of 59 to 61 runs are common


@pytest.mark.parametrize(
    ("left", "right"), [("What is 2+2?", "What is 2-2?"), ("好的", "不好"), ("?", "!"), ("yes", "no")]
)
def test_short_texts_that_differ_are_both_new(left: str, right: str) -> None:
    duplicates = NearDuplicates(0.8)
    assert duplicates.is_new(left)
    assert duplicates.is_new(right)
    assert not duplicates.is_new(f" {left} ")


def test_chinese_texts_that_differ_in_one_character_are_duplicates() -> None:
    text = "您好，我的银行卡昨天在超市丢了，请帮我挂失并且补办一张新卡，谢谢您的帮助"
    duplicates = NearDuplicates(0.8)
    assert duplicates.is_new(text)
    assert not duplicates.is_new(text.replace("昨天", "前天"))
    assert duplicates.is_new("请问附近的网点周末是否营业，我想去办理外币兑换业务")


def test_long_text_is_hashed_in_pieces() -> None:
    text = " ".join(str(i) for i in range(10_000))
    duplicates = NearDuplicates(0.8)
    assert duplicates.is_new(text)
    assert not duplicates.is_new(text + " end")


def test_random_state_of_the_caller_is_untouched() -> None:
    state = random.getstate()
    NearDuplicates(0.8).is_new("some text of a row")
    assert random.getstate() == state


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1.1, float("nan")])
def test_threshold_outside_its_range_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        NearDuplicates(threshold)
