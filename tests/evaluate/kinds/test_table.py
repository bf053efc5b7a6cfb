"""The contract of every kind: what is right scores 1, what is wrong 0, items that cannot be scored are refused."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quantpipe.evaluate.kinds.kind import Item, Kind, Response, Scorer, TaskKeys
from quantpipe.evaluate.kinds.table import KINDS

SCHEMA = {"type": "object", "required": ["order"], "properties": {"order": {"type": "integer"}}}
TESTS = "assert double(2) == 4"
RIGHT_CODE, WRONG_CODE = "def double(x):\n    return 2 * x", "def double(x):\n    return x"


class Case(NamedTuple):
    keys: Mapping[str, Any]
    fields: Mapping[str, Any]
    right: Response
    wrong: Response
    predictions: tuple[str, str]
    bad_fields: Mapping[str, Any]
    reason: str


CASES = {
    "choice": Case(
        {"choices": ["billing", "delivery"]},
        {"target": "delivery"},
        (-3.0, -1.0),
        (-1.0, -3.0),
        ("delivery", "billing"),
        {"target": "delivry"},
        "is not among its 2 choices; did you mean 'delivery'?",
    ),
    "exact": Case(
        {"disregard": ["case", "punctuation"]},
        {"target": ["Two hours", "2 hours"]},
        " two  hours.\n",
        "three hours",
        ("two hours", "three hours"),
        {"target": "?!"},
        "nothing is left of the target '?!'",
    ),
    "contains": Case(
        {},
        {"target": "Refund"},
        "We start your refund today.",
        "We do nothing.",
        ("Refund", ""),
        {"target": []},
        "found an empty list",
    ),
    "regex": Case(
        {"pattern": r"order (\d+)"},
        {"target": "17"},
        "It is order 17.",
        "It is order 18.",
        ("17", "18"),
        {"target": None},
        "found nothing",
    ),
    "json_schema": Case(
        {"json_schema": SCHEMA, "fields": ["order"]},
        {"target": '{"order": 5}'},
        '```json\n{"order": 5, "x": 1}\n```',
        '{"order": "5"}',
        ('{"order": 5, "x": 1}', '{"order": "5"}'),
        {"target": '{"ordr": 5}'},
        "the target has no field 'order'",
    ),
    "numeric": Case(
        {"abs_tol": 0.01, "units": {"kg": 1000, "g": 1}},
        {"target": "1,234.5 g"},
        "It weighs 1.2345 kg.",
        "It weighs 1,234.6 g.",
        ("1234.5", "1234.6"),
        {"target": "many"},
        "the target 'many' has 0 numbers in it",
    ),
    "code": Case(
        {"timeout_s": 5},
        {"tests": TESTS},
        f"Here:\n```python\n{RIGHT_CODE}\n```\nDone.",
        WRONG_CODE,
        ("passed", "AssertionError"),
        {"tests": "assert ("},
        "is not Python",
    ),
    "similarity": Case(
        {"threshold": 0.5},
        {"target": ["The parcel arrives on Monday.", "It comes on Monday."]},
        "The parcel arrives on Monday",
        "No idea",
        ("The parcel arrives on Monday", "No idea"),
        {"target": ""},
        "found nothing",
    ),
    "judge": Case(  # its replies are tested with a server, in test_judge.py
        {"url": "http://127.0.0.1:9", "model": "m", "judge_prompt": "{% if topic %}{{ answer }}{% endif %}"},
        {"topic": "x"},
        "",
        "",
        ("", ""),
        {"topic": ""},
        "judge_prompt renders to nothing",
    ),
}
OFFLINE = sorted(set(KINDS) - {"judge"})


def opened(name: str) -> tuple[Kind, TaskKeys, Scorer]:
    kind = KINDS[name]
    keys = kind.keys.model_validate({"name": "t", "kind": name, "file": "a.csv", "prompt": "p", **CASES[name].keys})
    return kind, keys, kind.open(keys, Path(), lambda key: f"suite.yaml:1:1: {key}")


def item_of(keys: TaskKeys, fields: Mapping[str, Any]) -> Item:
    return Item("i", "a.csv:2", "p", fields.get("target"), fields, keys.choices_of(fields))


def test_every_kind_has_a_case_and_a_file_of_its_own() -> None:
    assert set(CASES) == set(KINDS)
    assert len({kind.open.__module__ for kind in KINDS.values()}) == len(KINDS)
    assert all(kind.says and kind.asks in ("choices", "text") for kind in KINDS.values())


@pytest.mark.parametrize("name", OFFLINE)
def test_right_answers_score_1_wrong_ones_0_and_predictions_are_what_was_compared(name: str) -> None:
    _, keys, scorer = opened(name)
    case = CASES[name]
    item = item_of(keys, case.fields)
    scorer.check(item)
    scored = [scorer.score(item, response) for response in (case.right, case.wrong)]
    assert [each.score for each in scored] == [1.0, 0.0]
    assert tuple(each.prediction for each in scored) == case.predictions


@pytest.mark.parametrize("name", sorted(KINDS))
def test_an_item_that_no_answer_is_right_for_is_refused(name: str) -> None:
    _, keys, scorer = opened(name)
    with pytest.raises(ValueError) as raised:
        scorer.check(item_of(keys, {**CASES[name].fields, **CASES[name].bad_fields}))
    assert CASES[name].reason in str(raised.value)


@pytest.mark.parametrize("name", OFFLINE)
def test_an_empty_answer_is_wrong_and_no_error(name: str) -> None:
    kind, keys, scorer = opened(name)
    if kind.asks == "text":
        assert scorer.score(item_of(keys, CASES[name].fields), "").score == 0.0


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_kind_names_the_fields_that_it_reads(name: str) -> None:
    _, keys, _ = opened(name)
    assert set(CASES[name].fields) == set(keys.item_fields())


def scorer_of(name: str, **changed: Any) -> Scorer:
    kind = KINDS[name]
    keys = {"name": "t", "kind": name, "file": "a.csv", "prompt": "p", **CASES[name].keys, **changed}
    return kind.open(kind.keys.model_validate(keys), Path(), lambda key: key)


def test_the_margin_of_choices_is_in_nats_and_length_may_count() -> None:
    item = Item("i", "w", "p", "bb", {}, ("a", "bb"))
    assert scorer_of("choice").score(item, (-1.0, -1.5)).margin == pytest.approx(0.5)
    scored = scorer_of("choice", length="characters").score(item, (-1.0, -1.5))
    assert (scored.prediction, scored.score) == ("bb", 1.0)
    assert scored.margin == pytest.approx(0.25)


def test_a_target_may_be_the_place_of_a_choice() -> None:
    assert scorer_of("choice").score(Item("i", "w", "p", 1, {}, ("a", "b")), (-2.0, -1.0)).score == 1.0


@pytest.mark.parametrize(
    ("text", "settings", "numbers"),
    [
        ("between 3 and 1,000,000.25", {}, [3, 1000000.25]),
        ("-5 or \u22126, 7-8", {}, [-5, -6, 7, 8]),
        ("1.5e3 and .5", {}, [1500, 0.5]),
        ("1.234,5 und 2,75", {"decimal": ","}, [1234.5, 2.75]),
        ("1 234 567", {}, [1234567]),
        ("version 1.2.3, x86", {}, [1.2]),
        ("$12 and 12%", {"units": {"%": 0.01}}, [12, 0.12]),
        ("3 kgs, 3 kg, 3kg, 3 g", {"units": {"kg": 1000, "g": 1}}, [3, 3000, 3000, 3]),
        ("none", {}, []),
    ],
)
def test_numbers_are_read_as_people_write_them(text: str, settings: dict[str, Any], numbers: list[float]) -> None:
    scorer: Any = scorer_of("numeric", **{"units": {}, **settings})
    assert scorer.numbers(text)[: len(numbers)] == pytest.approx(numbers)
    assert bool(scorer.numbers(text)) == bool(numbers)


def test_tolerances_are_absolute_or_relative_and_a_number_may_be_the_last() -> None:
    item = Item("i", "w", "p", 200.0)
    assert scorer_of("numeric", abs_tol=0.0, rel_tol=0.01).score(item, "198").score == 1.0
    assert scorer_of("numeric", abs_tol=0.0, rel_tol=0.01).score(item, "197.9").score == 0.0
    assert scorer_of("numeric", take="last").score(item, "first 1, then 200").prediction == "200"


def test_contains_may_want_all_and_exact_may_disregard_articles_and_width() -> None:
    both = Item("i", "w", "p", ["a refund", "Monday"])
    assert scorer_of("contains", wanted="all").score(both, "A refund on monday").score == 1.0
    assert scorer_of("contains", wanted="all").score(both, "on Monday").score == 0.0
    wide = scorer_of("exact", disregard=["articles", "unicode", "case"])
    assert wide.score(Item("i", "w", "p", "the ABC"), "\uff41\uff42\uff43").score == 1.0


def test_a_pattern_without_group_needs_no_target_and_items_may_bring_their_own() -> None:
    plain = scorer_of("regex", pattern=r"\bEUR \d+\b")
    assert plain.score(Item("i", "w", "p"), "costs EUR 12 in all").prediction == "EUR 12"
    own = scorer_of("regex", pattern=None)
    assert own.score(Item("i", "w", "p", r"^yes"), "yes, sir").score == 1.0
    with pytest.raises(ValueError, match="not a regular expression"):
        own.check(Item("i", "w", "p", "(["))


def test_a_pattern_that_takes_for_ever_is_an_error_and_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from quantpipe.errors import DataError
    from quantpipe.evaluate.kinds import regex_match

    monkeypatch.setattr(regex_match, "MOST_SECONDS", 0.05)
    slow = scorer_of("regex", pattern=r"^(?:a|a)*(?:a|a)*c(?:x)?$|^(?:(?:a+)+)+$")
    with pytest.raises(DataError, match="takes more than"):
        slow.score(Item("i", "a.csv:2", "p"), "a" * 60 + "b")


def test_similarity_without_a_threshold_is_a_share() -> None:
    scorer = scorer_of("similarity", threshold=None)
    item = Item("i", "w", "p", "The parcel arrives on Monday.")
    values = [scorer.score(item, text).score for text in ("The parcel arrives on Monday.", "The parcel is late", "")]
    assert values[0] == 1.0 and 0 < values[1] < 1 and values[2] == 0.0
    assert scorer_of("similarity", threshold=None, metric="bleu").score(item, item.target).score == pytest.approx(1.0)


def test_code_may_continue_the_prompt() -> None:
    item = Item("i", "w", "def double(x):\n", None, {"tests": TESTS})
    scorer = scorer_of("code", continues_prompt=True)
    assert scorer.score(item, "    return 2 * x\n").score == 1.0
    assert scorer_of("code").score(item, "    return 2 * x\n").score == 0.0


def test_items_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Item("i", "w", "p").id = "j"  # type: ignore[misc]
