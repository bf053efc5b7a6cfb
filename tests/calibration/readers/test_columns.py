"""Fields that a source names and no row has: said once, with what there is."""

import json
from pathlib import Path
from typing import Any

import pytest
from calibration.reading import Reading

from quantpipe.calibration.readers.columns import PATIENCE_ROWS
from quantpipe.errors import DataError

KEYS = [
    {"group": "user"},
    {"language": {"field": "user"}},
    {"domain": {"field": "user"}},
    {"filter": {"where": {"user": 1}}},
    {"filter": {"exclude": {"user": 1}}},
    {"drop_columns": ["user"]},
    {"fields": {"text": ["text", "user"]}},
]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.mark.parametrize("keys", KEYS, ids=str)
@pytest.mark.parametrize(
    ("name", "stored", "what"),
    [
        ("a.csv", b"text,users\nsecret,1\n", "column"),
        ("a.jsonl", lines([{"text": "secret", "users": 1}]), "field"),
        ("a.json", b'{"1": {"text": "secret", "users": 1}}', "field"),
    ],
)
def test_a_name_that_is_nowhere_is_refused(
    tmp_path: Path, keys: dict[str, Any], name: str, stored: bytes, what: str
) -> None:
    with pytest.raises(DataError) as caught:
        Reading(tmp_path, stored, name, **keys)
    assert f"no {what} 'user'; there are: " in str(caught.value)
    assert "did you mean 'users'?" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("keys", KEYS[:-1], ids=str)
def test_a_field_that_few_objects_have_is_no_mistake(tmp_path: Path, keys: dict[str, Any]) -> None:
    rows: list[dict[str, Any]] = [{"text": "a"}] * (PATIENCE_ROWS + 1) + [{"text": "b", "user": "u"}]
    assert len(Reading(tmp_path, lines(rows), "a.jsonl", **keys).rows) == PATIENCE_ROWS + 2


def test_a_field_of_the_text_is_not_waited_for_to_the_end(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"txt": "a"}] * PATIENCE_ROWS + [{"text": "b"}]
    with pytest.raises(DataError, match="no field 'text'; there are: txt; did you mean 'txt'"):
        Reading(tmp_path, lines(rows), "a.jsonl")


def test_a_limit_that_ends_early_proves_nothing_about_rare_fields(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": "a"}] * 3 + [{"text": "b", "user": "u"}]
    assert len(Reading(tmp_path, lines(rows), "a.jsonl", group="user", limit=2).rows) == 2


def test_dropped_columns_are_gone(tmp_path: Path) -> None:
    for name, stored in (("a.csv", b"text,phone\na,1\n"), ("a.jsonl", b'{"text": "a", "phone": 1}')):
        assert [row.values for row in Reading(tmp_path, stored, name, drop_columns=["phone"]).rows] == [{"text": "a"}]
