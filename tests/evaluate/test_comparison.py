"""Two models on the same items: what flipped, where, and how nearly it did not."""

import pytest
from suite_items import comparison, flipped, item

from quantpipe.evaluate.comparison import Comparison, unknown_scope
from quantpipe.evaluate.paired import paired_accuracy


def test_flips_changes_and_near_ties_are_counted_apart() -> None:
    pairs = (
        (item(0, 1.0, margin=0.05), item(0, 0.0, margin=0.02)),  # lost, undecided in both
        (item(1, 1.0, margin=2.0), item(1, 0.0, margin=0.01)),  # lost, by far
        (item(2, 0.0), item(2, 1.0)),  # gained, no choices
        (item(3, 0.0, prediction="a"), item(3, 0.0, prediction="b")),  # another answer, as wrong
        (item(4, 1.0), item(4, 1.0)),
    )
    found = Comparison(pairs)
    assert (len(found.lost), len(found.gained), found.num_changed, found.num_near_ties) == (2, 1, 4, 1)
    assert found.mcnemar_p == 1.0


def test_task_and_slice_select_their_items() -> None:
    german = flipped(30, 2, task="intent", slices={"language": "de", "product": "x"})
    english = flipped(40, 0, task="intent", slices={"language": "en"})
    other = flipped(20, 1, task="faq", slices={"language": "de"})
    whole = Comparison(german.pairs + english.pairs + other.pairs)
    assert len(whole.select("intent").pairs) == 70
    assert len(whole.select(slices={"language": "de"}).pairs) == 50
    assert whole.select("intent", {"language": "de", "product": "x"}).pairs == german.pairs
    assert whole.select("faq", {"language": "en"}).pairs == ()
    assert whole.select("faq").loss().num_samples == 20


def test_measurements_are_those_of_the_items() -> None:
    found = flipped(90, 4, 1, cluster_size=3)
    base, cand = [b.score for b, _ in found.pairs], [c.score for _, c in found.pairs]
    assert found.loss() == paired_accuracy(base, cand, [b.cluster for b, _ in found.pairs])
    assert found.num_clusters == 30
    assert found.loss(0.99).high > found.loss(0.9).high
    assert found.own().value == pytest.approx(86 / 90)
    assert found.recovery().value == pytest.approx(86 / 89)


def test_task_or_slice_that_nobody_has_is_named_with_those_that_are() -> None:
    items = [base for base, _ in comparison([1.0] * 4, [1.0] * 4, slices={"language": "de"}).pairs]
    assert unknown_scope(items, "intent", {"language": "de"}) is None
    assert unknown_scope(items, "intents", {}) == "task: no item is of task 'intents' (known: intent)"
    assert unknown_scope(items, None, {"language": "fr"}) == "slice: no item has language 'fr' (its values: de)"
    assert unknown_scope(items, None, {"lang": "de"}) == "slice: no item has lang 'de' (known fields: language)"
