"""A set's own expressions: found, and stopped where they run away."""

import pytest

from quantpipe.calibration.redaction.patterns import Pattern
from quantpipe.errors import DataError


def test_all_matches_are_found_in_the_text_as_it_is_written() -> None:
    spans = list(Pattern("order_id", r"ORD-[0-9]{4}|单号\w{3}").find("ORD-1234, ORD-56 and 单号AB7", "t.csv:1"))
    assert [(span.start, span.value) for span in spans] == [(0, "ORD-1234"), (21, "单号AB7")]


def test_a_runaway_expression_is_stopped_and_named_without_the_text() -> None:
    text = "secretvalue" + "a" * 60 + "!"
    with pytest.raises(DataError) as caught:
        list(Pattern("bad", r"(?:a+)+b|(?:a|aa)+c|(?:\w*)*#").find(text, "t.csv:7", most_s=0.02))
    message = str(caught.value)
    assert message.startswith("t.csv:7: redact.patterns.bad takes too long on this row; ")
    assert "secretvalue" not in message
    assert caught.value.__cause__ is None


def test_a_match_of_nothing_is_an_error_and_not_left_out() -> None:
    with pytest.raises(DataError, match=r"t.csv:3: redact.patterns.edge matches nothing at all here"):
        list(Pattern("edge", r"(?<=x)y*").find("ax", "t.csv:3"))
