"""A model that is read in step stops between its chunks, and is ended wherever it is."""

import threading

import numpy as np
import pytest

from quantpipe.errors import DataError
from quantpipe.evaluate.fidelity.in_step import RowsInStep, logits_in_step
from tests.evaluate.conftest import BigramEngine, random_table

WINDOW = tuple(range(20, 44))


def test_rows_come_in_any_portions() -> None:
    table_VV = random_table(1).astype(np.float32)
    reader = RowsInStep(BigramEngine(table_VV, 5), WINDOW, "here")
    taken = [reader.take(num_rows).copy() for num_rows in (1, 9, 2, 11)]
    reader.finish()
    np.testing.assert_array_equal(np.concatenate(taken), table_VV[list(WINDOW[:-1])])


def test_a_model_that_fails_says_so_to_who_asks() -> None:
    class Failing(BigramEngine):
        def generate(self, prompts, params, prompt_logits_sinks=None):  # type: ignore[no-untyped-def]
            prompt_logits_sinks[0](0, self.table_VV[:4].astype(np.float32))
            raise RuntimeError("out of memory")

    chunks = logits_in_step(Failing(random_table(1)), WINDOW)
    assert next(chunks)[0] == 0
    with pytest.raises(RuntimeError, match="out of memory"):
        next(chunks)


def test_a_model_nobody_reads_on_from_is_ended() -> None:
    before = threading.active_count()
    chunks = logits_in_step(BigramEngine(random_table(1), 4), WINDOW)
    next(chunks)
    assert threading.active_count() == before + 1
    chunks.close()
    assert threading.active_count() == before


def test_rows_out_of_order_and_missing_rows_are_refused() -> None:
    class Reversed(BigramEngine):
        def generate(self, prompts, params, prompt_logits_sinks=None):  # type: ignore[no-untyped-def]
            for first in (12, 0):
                prompt_logits_sinks[0](first, self.table_VV[list(prompts[0][first : first + 12])].astype(np.float32))
            return []

    with pytest.raises(DataError, match="here: logits did not come in order of position"):
        RowsInStep(Reversed(random_table(1)), WINDOW, "here").take(3)
    short = RowsInStep(BigramEngine(random_table(1)), WINDOW[:10], "here")
    with pytest.raises(DataError, match="here: 4 of 9 positions did not get one row of logits"):
        short._num_rows_T[:4] += 1  # as if these had come before
        short.take(20)
