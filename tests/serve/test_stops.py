"""Stop strings in a text that arrives in pieces."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from quantpipe.serve.stops import StopMatcher

few_letters = st.text(alphabet="ab好", max_size=12)
stop_lists = st.lists(st.text(alphabet="ab好", min_size=1, max_size=4), max_size=4)


def emitted(pieces: Sequence[str], stops: Sequence[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops)
    texts = [matcher.push(piece) for piece in pieces]
    return [*texts, matcher.finish()], matcher.stopped


@given(st.lists(few_letters, max_size=6), stop_lists)
def test_the_cut_into_pieces_does_not_change_the_text(pieces: list[str], stops: list[str]) -> None:
    texts, stopped = emitted(pieces, stops)
    texts_by_character, stopped_by_character = emitted("".join(pieces), stops)
    assert "".join(texts) == "".join(texts_by_character)
    assert stopped == stopped_by_character


@given(st.lists(few_letters, max_size=6), stop_lists)
def test_what_is_let_out_is_the_text_before_the_first_complete_stop(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    complete = [(end, text.find(stop)) for stop in stops if (end := text.find(stop) + len(stop)) >= len(stop)]
    texts, stopped = emitted(pieces, stops)
    assert stopped == bool(complete)
    assert "".join(texts) == (text[: min(complete)[1]] if complete else text)


@given(few_letters, few_letters, stop_lists)
def test_stop_that_ends_where_it_may_not_is_text_and_one_that_begins_there_counts(
    first: str, second: str, stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown = [*(matcher.push(letter, may_stop=False) for letter in first), matcher.push(second), matcher.finish()]
    text = first + second
    starts = [(text.find(stop, max(0, len(first) - len(stop) + 1)), len(stop)) for stop in stops]
    complete = [(start + length, start) for start, length in starts if start >= 0]
    assert matcher.stopped == bool(complete)
    assert "".join(shown) == (text[: min(complete)[1]] if complete else text)


def test_only_a_possible_beginning_of_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.push("one </") == "one "
    assert matcher.push("b> two") == "</b> two"
    assert matcher.push("<") == ""
    assert matcher.finish() == "<"
    assert not matcher.stopped
