"""Which items flipped, by name: redacted, with ties where margins are known."""

from dataclasses import replace

import pytest

from quantpipe.evaluate.items import ItemResult, SuiteResult
from quantpipe.evidence.item_flips import flip_rows, is_near_tie

ITEM = ItemResult("t", "id", "law", "c", 1.0, "digest", "the whole secret answer", "secret", None, {})


def result(*items: ItemResult) -> SuiteResult:
    return SuiteResult("s", "d", items)


def test_flips_go_both_ways_and_what_stays_is_left_out() -> None:
    items = [replace(ITEM, doc_id=name) for name in ("lost", "gained", "right", "wrong")]
    base = result(*(replace(item, score=score) for item, score in zip(items, (1, 0, 1, 0), strict=True)))
    candidate = result(*(replace(item, score=score) for item, score in zip(items, (0, 1, 1, 0), strict=True)))
    assert [(flip.doc_id, flip.is_lost) for flip in flip_rows(base, candidate)] == [("lost", True), ("gained", False)]


def test_no_text_is_kept_and_what_names_a_person_is_replaced() -> None:
    item = replace(ITEM, doc_id="mail from ann.lee@example.com", slices={"owner": "bob@example.org"})
    [flip] = flip_rows(result(item), result(replace(item, score=0.0)))
    text = repr(flip)
    assert "example.com" not in text and "example.org" not in text
    assert "secret" not in text
    assert flip.doc_id.startswith("mail from ")


@pytest.mark.parametrize(
    ("before", "after", "expected"), [(None, None, None), (0.05, 3.0, True), (3.0, 0.01, True), (0.5, None, False)]
)
def test_a_tie_is_near_where_either_model_hardly_prefers_its_choice(
    before: float | None, after: float | None, expected: bool | None
) -> None:
    assert is_near_tie(replace(ITEM, margin=before), replace(ITEM, margin=after)) is expected
