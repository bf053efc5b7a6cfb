"""What a report says of a suite: rows by task and domain, flips by cluster and by name alone."""

import pytest
from suite_items import comparison, flipped

from quantpipe.evaluate.comparison import Comparison
from quantpipe.verdict.score_rows import WHOLE, score_rows


def test_whole_suite_its_tasks_and_its_domains_have_a_row_each() -> None:
    code = comparison([1, 1, 0], [0, 1, 1], task="a", domain="code")
    prose = comparison([1, 1], [1, 1], task="b", domain="prose")
    rows = {row.task: row for row in score_rows(Comparison(code.pairs + prose.pairs))}
    assert list(rows) == [WHOLE, "a", "b", "code", "prose"]
    figures = [(r.num_items, r.baseline_correct, r.candidate_correct, r.num_lost, r.num_gained) for r in rows.values()]
    assert figures == [(5, 4, 4, 1, 1), (3, 2, 2, 1, 1), (2, 2, 2, 0, 0), (3, 2, 2, 1, 1), (2, 2, 2, 0, 0)]
    assert rows["a"].mcnemar_p == 1.0 and rows["a"].num_changed == 2


def test_recovery_stands_beside_its_interval_and_one_cluster_has_none() -> None:
    (row,) = score_rows(flipped(200, 10))
    assert row.recovery.startswith("95 % (0.9") and row.mcnemar_p == pytest.approx(2 / 2**10)
    (single,) = score_rows(flipped(5, 1, cluster_size=5))
    assert single.recovery == "-"
