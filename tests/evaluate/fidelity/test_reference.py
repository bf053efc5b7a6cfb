"""A stored baseline: a lower bound of KL, exact in all else, and never taken for another."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quantpipe.errors import DataError
from quantpipe.evaluate.divergence import DivergenceResult, measure_against, measure_divergence
from quantpipe.evaluate.fidelity.reference import load_reference, make_reference, save_reference
from quantpipe.evaluate.fidelity.windows import window_record
from quantpipe.gate.judge import Measurement
from tests.evaluate.conftest import VOCAB_SIZE, BigramEngine, random_table

WINDOWS = np.random.default_rng(9).integers(0, VOCAB_SIZE, size=(6, 24)).tolist()


def near(table_VV: np.ndarray) -> np.ndarray:
    return table_VV + np.random.default_rng(4).normal(size=table_VV.shape) * 0.5


def named(result: DivergenceResult, name: str) -> Measurement:
    [found] = [each for each in result.measurements if each.name == name]
    return found


@pytest.mark.parametrize("rows_per_chunk", [5, 1000])
def test_kl_is_a_lower_bound_that_rises_with_what_is_kept(rows_per_chunk: int) -> None:
    base, cand = BigramEngine(random_table(1), rows_per_chunk), BigramEngine(near(random_table(1)), rows_per_chunk)
    exact = measure_divergence(base, cand, WINDOWS)
    bounds = []
    for top_k in (1, 8, 32, VOCAB_SIZE):
        found = measure_against(make_reference(base, WINDOWS, top_k), cand, WINDOWS)
        bounds.append(named(found, "mean_kl_topk").value)
        assert found.top_k == top_k
        assert "a lower bound" in named(found, "p99_kl_topk").detail
        for name in ("perplexity_ratio", "top1_agreement"):
            assert named(found, name).value == pytest.approx(named(exact, name).value, rel=1e-12)
    true_kl = named(exact, "mean_kl").value
    assert bounds == sorted(bounds) and bounds[0] < 0.5 * true_kl and bounds[2] > 0.8 * true_kl
    assert bounds[3] == pytest.approx(true_kl, rel=1e-5)


def test_the_bound_is_that_of_the_definition() -> None:
    base_VV, cand_VV = (table.astype(np.float32).astype(np.float64) for table in (random_table(1), random_table(2)))
    reference = make_reference(BigramEngine(base_VV), WINDOWS, 4)
    found = measure_against(reference, BigramEngine(cand_VV), WINDOWS)
    p_VV, q_VV = (np.exp(table) / np.exp(table).sum(-1, keepdims=True) for table in (base_VV, cand_VV))
    expected = []
    for token in np.array(WINDOWS)[:, :-1].ravel():
        order = np.argsort(-p_VV[token])
        p, q = (np.append(x[token][order[:4]], x[token][order[4:]].sum()) for x in (p_VV, q_VV))
        expected.append((p * np.log(p / q)).sum())
    assert named(found, "mean_kl_topk").value == pytest.approx(np.mean(expected), rel=1e-6)


def test_a_model_against_itself_is_zero_but_for_rounding() -> None:
    engine = BigramEngine(random_table(1))
    found = measure_against(make_reference(engine, WINDOWS, 8), engine, WINDOWS)
    assert named(found, "mean_kl_topk").value < 1e-7
    assert (named(found, "perplexity_ratio").value, named(found, "top1_agreement").value) == (1.0, 1.0)


def test_stored_and_read_again_it_is_the_same(tmp_path: Path) -> None:
    path, cand = tmp_path / "cache" / "a.safetensors", BigramEngine(near(random_table(1)))
    made = make_reference(BigramEngine(random_table(1)), WINDOWS, 16)
    assert load_reference(path) is None
    save_reference(made, path)
    read = load_reference(path)
    assert read is not None
    ours, theirs = measure_against(read, cand, WINDOWS), measure_against(made, cand, WINDOWS)
    assert [window_record(each) for each in ours.windows] == [window_record(each) for each in theirs.windows]
    assert replace(ours, windows=()) == replace(theirs, windows=())
    num_positions = 6 * 23
    assert made.token_bytes == 16 * (2 + 4) + 8 + 8 + 4  # two bytes for an id, float32 for a log-probability
    assert path.stat().st_size < num_positions * made.token_bytes + 1000
    path.write_bytes(path.read_bytes()[:-5])
    assert load_reference(path) is None


def test_other_windows_other_vocabularies_and_broken_logits_are_refused() -> None:
    engine = BigramEngine(random_table(1))
    reference = make_reference(engine, WINDOWS, 8)
    with pytest.raises(DataError, match="stored baseline is of other windows"):
        measure_against(reference, engine, WINDOWS[::-1])
    with pytest.raises(DataError, match="window 0: vocabulary of 128 in the baseline, 64 in the candidate"):
        small = [[token % 64 for token in window] for window in WINDOWS]
        measure_against(make_reference(engine, small), BigramEngine(random_table(1)[:64, :64]), small)
    broken_VV = random_table(1)
    broken_VV[WINDOWS[1][3]] = np.nan
    with pytest.raises(DataError, match="baseline: 1 of 23 positions have no finite value"):
        make_reference(BigramEngine(broken_VV), WINDOWS)
    with pytest.raises(DataError, match="candidate: 1 of 23 positions have no finite value"):
        measure_against(reference, BigramEngine(broken_VV), WINDOWS)
