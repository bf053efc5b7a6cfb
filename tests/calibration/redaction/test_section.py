"""The redact section: off, left-out rules, own patterns, and what is refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from quantpipe.calibration.redaction.section import RULE_NAMES, RedactSection


def refusal(data: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        RedactSection.model_validate(data)
    return str(caught.value.errors()[0]["msg"])


def test_all_rules_run_unless_they_are_left_out() -> None:
    assert RedactSection().rules == RULE_NAMES
    section = RedactSection.model_validate({"without": ["ip", "us_ssn"]})
    assert set(RULE_NAMES) - set(section.rules) == {"ip", "us_ssn"}
    assert not section.is_off


def test_off_runs_nothing_and_is_the_only_word() -> None:
    assert RedactSection.model_validate("off").is_off
    assert "found 'on' (text); allowed: off, or a mapping" in refusal("on")
    assert "found false; allowed: off, or a mapping" in refusal(False)


def test_patterns_of_ones_own_run_where_all_rules_are_left_out() -> None:
    section = RedactSection.model_validate({"without": list(RULE_NAMES), "patterns": {"order_id": "ORD-[0-9]{8}"}})
    assert not section.is_off
    assert not section.rules


@pytest.mark.parametrize("pattern", ["x*", "", "a?|b", "(?:)", "$"])
def test_a_pattern_that_matches_nothing_is_refused(pattern: str) -> None:
    message = refusal({"patterns": {"mine": pattern}})
    assert "matches the empty string" in message or "at least 1 character" in message


def test_a_pattern_that_is_no_expression_or_takes_a_rules_name_is_refused() -> None:
    assert "'mine' is not a regular expression: " in refusal({"patterns": {"mine": "ORD-("}})
    assert "'email' is the name of a built-in rule" in refusal({"patterns": {"email": "x"}})
    assert "match pattern" in refusal({"patterns": {"Mine!": "x"}})


def test_unknown_keys_rules_and_regions_are_refused() -> None:
    assert "not permitted" in refusal({"withuot": []})
    assert "'us_ssn'" in refusal({"without": ["emial"]})
    assert "'ZZ'" in refusal({"regions": ["CN", "ZZ"]})
    assert RedactSection.model_validate({"regions": ["DE", "JP"]}).regions == ("DE", "JP")
