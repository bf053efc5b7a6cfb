import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from quantpipe.calibration.text.words import ngram_hashes, normalised, text_digest, words

# Letters of which upper and lower case are each other's: not so for the Turkish dotless i, for example.
LETTERS = "abcxyzäöüßéñабвяαβγσ"
TEXTS = st.text(st.sampled_from(LETTERS + "0129 卡片丢了ひらカナ한국"), max_size=60)
FULL_WIDTH = {code: code + 0xFEE0 for code in range(0x21, 0x7F)} | {0x20: 0x3000}


@given(TEXTS)
def test_case_does_not_count(text: str) -> None:
    assert words(text.upper()) == words(text) == words(text.title())


@given(TEXTS, st.sampled_from([" ", "  ", "\n", "\t", "\u3000", "\u00a0", "\r\n"]))
def test_kind_and_amount_of_white_space_do_not_count(text: str, space: str) -> None:
    assert normalised(f"{space}{text.replace(' ', space)}{space}") == normalised(text)


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=60))
def test_full_width_forms_equal_ordinary_ones(text: str) -> None:
    assert normalised(text.translate(FULL_WIDTH)) == normalised(text)


@given(st.lists(st.sampled_from(["card", "lost", "卡", "2", "ok"]), min_size=1), st.data())
def test_punctuation_only_separates(of: list[str], data: st.DataObject) -> None:
    marks = st.sampled_from([" ", ", ", "... ", "，", "。", " (", ") - ", "！？", "\u201c", "/"])
    text = "".join(word + data.draw(marks) for word in of)
    assert words(text) == of


@given(st.text(max_size=80))
def test_normalising_again_changes_nothing(text: str) -> None:
    assert normalised(normalised(text)) == normalised(text)


def test_apostrophes_and_invisible_characters_vanish() -> None:
    assert words("can't can\u2019t cant ca\u00adn't c\u200bant") == ["cant"] * 5


def test_symbols_are_words_so_that_sums_stay_different() -> None:
    assert words("2+2") == ["2", "+", "2"]
    assert normalised("x < 3") != normalised("x > 3")


def test_marks_stay_with_their_letters() -> None:
    assert words("हिन्दी में") == ["हिन्दी", "में"]


def test_texts_without_words_are_still_told_apart() -> None:
    assert normalised("?!") == "?!"
    assert text_digest("...") != text_digest("!!!")


@given(TEXTS, TEXTS)
def test_digests_agree_exactly_when_normalised_texts_do(left: str, right: str) -> None:
    assert (text_digest(left) == text_digest(right)) == (normalised(left) == normalised(right))


@given(st.lists(st.sampled_from("abcd"), max_size=30), st.integers(1, 9))
def test_as_many_hashes_as_distinct_runs(of: list[str], size: int) -> None:
    runs = {tuple(of[i : i + size]) for i in range(len(of) - size + 1)}
    hashes = ngram_hashes(of, size).tolist()
    assert len(hashes) == len(runs)
    assert hashes == sorted(hashes)


def test_order_of_words_counts_in_a_run() -> None:
    assert ngram_hashes(["a", "b", "c"], 3).tolist() != ngram_hashes(["c", "b", "a"], 3).tolist()


def test_half_a_surrogate_pair_is_no_error() -> None:
    assert words("a\ud800b") == ["a", "b"]
    assert text_digest("\ud800") != text_digest("\ud801")


def test_hashes_are_the_same_in_another_process() -> None:
    code = "from quantpipe.calibration.text.words import *; print(ngram_hashes(words('a b c d'), 2).tolist())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(ngram_hashes(words("a b c d"), 2).tolist())
