"""Which items flipped, by name: redacted, with ties where margins are known."""

from dataclasses import replace

import pytest

from quantpipe.evaluate.comparison import Comparison
from quantpipe.evaluate.items import ItemResult
from quantpipe.evidence.item_flips import flip_rows

ITEM = ItemResult("t", "id", "law", "c", 1.0, "digest", "the whole secret answer", "secret", None, {})


def test_flips_go_both_ways_and_what_stays_is_left_out() -> None:
    items = [replace(ITEM, doc_id=name) for name in ("lost", "gained", "right", "wrong")]
    scores = [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)]
    pairs = [(replace(item, score=b), replace(item, score=c)) for item, (b, c) in zip(items, scores, strict=True)]
    flips = flip_rows(Comparison(tuple(pairs)))
    assert [(flip.doc_id, flip.is_lost) for flip in flips] == [("lost", True), ("gained", False)]


def test_no_text_is_kept_and_what_names_a_person_is_replaced() -> None:
    item = replace(ITEM, doc_id="mail from ann.lee@example.com", slices={"owner": "bob@example.org"})
    [flip] = flip_rows(Comparison(((item, replace(item, score=0.0)),)))
    text = repr(flip)
    assert "example.com" not in text and "example.org" not in text
    assert "secret" not in text
    assert flip.doc_id.startswith("mail from ")


@pytest.mark.parametrize(
    ("before", "after", "expected"), [(None, None, None), (0.05, 0.01, True), (3.0, 0.01, False), (0.05, 3.0, False)]
)
def test_a_tie_is_near_where_both_models_hardly_prefer_their_choice(
    before: float | None, after: float | None, expected: bool | None
) -> None:
    pair = replace(ITEM, margin=before), replace(ITEM, margin=after, score=0.0)
    assert flip_rows(Comparison((pair,)))[0].is_near_tie is expected
