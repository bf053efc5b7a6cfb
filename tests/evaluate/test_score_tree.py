"""Scores of texts behind one context, from as few prompts as there are different beginnings."""

import numpy as np
import pytest

from quantpipe.errors import DataError
from quantpipe.evaluate.score_tree import ScoreTree
from tests.evaluate.conftest import random_table

CONTEXT = (5, 6, 7)


def filled(*texts: tuple[int, ...]) -> ScoreTree:
    tree = ScoreTree(len(CONTEXT))
    for text in texts:
        tree.add(text)
    return tree


def read(tree: ScoreTree, table_VV: np.ndarray, rows_per_chunk: int = 100, first: int = 0) -> None:
    for path in tree.paths():
        prompt, sink = (*CONTEXT, *path), tree.sink(path)
        for start in range(first, len(prompt), rows_per_chunk):
            sink(start, table_VV[list(prompt[start : start + rows_per_chunk])].astype(np.float32))


def test_the_last_token_of_a_text_is_not_read_and_beginnings_are_read_once() -> None:
    assert filled((1,), (2,), (3,)).paths() == [()]
    assert sorted(filled((1,), (2, 3), (2, 4), (5, 6, 7)).paths()) == [(2,), (5, 6)]
    assert filled((1, 2, 3), (1, 2), (1,)).paths() == [(1, 2)]


@pytest.mark.parametrize(("rows_per_chunk", "first"), [(100, 0), (100, 2), (1, 0), (1, 2), (2, 2)])
def test_scores_are_sums_along_the_text_however_the_rows_arrive(rows_per_chunk: int, first: int) -> None:
    table_VV, texts = random_table(3), [(1,), (2, 3), (2, 4), (9, 8, 7)]
    tree = filled(*texts)
    read(tree, table_VV, rows_per_chunk, first)
    for text in texts:
        whole = (CONTEXT[-1], *text)
        expected = sum(table_VV[a, b] for a, b in zip(whole, text, strict=False))
        assert tree.score(text)[0] == pytest.approx(expected, abs=1e-5)


def test_a_text_is_greedy_where_each_of_its_tokens_is_the_likeliest() -> None:
    table_VV = random_table(3)
    best = int(table_VV[CONTEXT[-1]].argmax())
    tree = filled((best, int(table_VV[best].argmax())), (best, 1), (1,))
    read(tree, table_VV)
    assert [tree.score(text)[1] for text in ((best, int(table_VV[best].argmax())), (1,))] == [True, best == 1]


def test_logits_that_are_missing_or_broken_are_errors() -> None:
    tree = filled((1, 2))
    with pytest.raises(DataError, match="returned no logits"):
        tree.score((1, 2))
    read(tree, np.full((128, 128), np.nan))
    with pytest.raises(DataError, match="log-likelihood nan of 2 tokens"):
        tree.score((1, 2))
