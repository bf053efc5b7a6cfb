"""Filters: values in fields and lengths of text."""

from typing import Any

import pytest

from quantpipe.calibration.definition.mapping import Filter
from quantpipe.calibration.rows import Row, Sample
from quantpipe.calibration.samples.filters import keeps_row, keeps_sample


@pytest.mark.parametrize(
    ("rules", "values", "is_kept"),
    [
        ({"where": {"lang": "zh"}}, {"lang": "zh "}, True),
        ({"where": {"lang": ["zh", "en"]}}, {"lang": "de"}, False),
        ({"where": {"n": 1}}, {"n": "1"}, True),
        ({"where": {"n": 1}}, {"n": 1.0}, True),
        ({"where": {"done": True}}, {"done": "true"}, True),
        ({"where": {"done": True}}, {"done": False}, False),
        ({"where": {"tags": "a"}}, {"tags": ["b", "a"]}, True),
        ({"where": {"meta.lang": "zh"}}, {"meta": {"lang": "zh"}}, True),
        ({"where": {"lang": "zh"}}, {}, False),
        ({"where": {"lang": None}}, {}, True),
        ({"where": {"a": 1, "b": 2}}, {"a": 1, "b": 3}, False),
        ({"exclude": {"lang": ["zh", "de"]}}, {"lang": "zh"}, False),
        ({"exclude": {"lang": "zh"}}, {"lang": "en"}, True),
        ({"exclude": {"lang": "zh"}}, {}, True),
        ({"exclude": {"lang": None}}, {"lang": None}, False),
        ({}, {}, True),
    ],
)
def test_rows_are_kept_by_their_values(rules: dict[str, Any], values: dict[str, Any], is_kept: bool) -> None:
    assert keeps_row(Row("f:1", values), Filter.model_validate(rules)) == is_kept


@pytest.mark.parametrize(("text", "is_kept"), [("ab", False), ("abc", True), ("abcde", True), ("abcdef", False)])
def test_samples_are_kept_by_their_length(text: str, is_kept: bool) -> None:
    rules = Filter(min_chars=3, max_chars=5)
    assert keeps_sample(Sample("f:1", text), rules) == is_kept


def test_the_length_of_a_conversation_is_that_of_all_messages() -> None:
    sample = Sample("f:1", ({"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}))
    assert keeps_sample(sample, Filter(min_chars=5))
    assert not keeps_sample(sample, Filter(max_chars=4))
