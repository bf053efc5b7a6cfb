"""Divergence on models with known distributions: exact values, exact zeros, and refusals."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import special

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.errors import DataError
from quantpipe.evaluate.divergence import DivergenceResult, measure_divergence, windows_from_text
from quantpipe.gate.judge import Measurement, measurement_problem
from tests.evaluate.conftest import VOCAB_SIZE, BigramEngine, CharCodec, random_table


def random_windows(num_windows: int, num_tokens: int = 24) -> list[list[int]]:
    return np.random.default_rng(9).integers(0, VOCAB_SIZE, size=(num_windows, num_tokens)).tolist()


def near(table_VV: np.ndarray) -> np.ndarray:
    return table_VV + np.random.default_rng(4).normal(size=table_VV.shape) * 0.5


def named(result: DivergenceResult, name: str) -> Measurement:
    [measurement] = [m for m in result.measurements if m.name == name]
    return measurement


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 1000])
def test_values_are_those_of_the_definitions(rows_per_chunk: int) -> None:
    base_VV, cand_VV = random_table(1).astype(np.float32), random_table(2).astype(np.float32)
    windows = random_windows(6)
    result = measure_divergence(BigramEngine(base_VV, rows_per_chunk), BigramEngine(cand_VV, rows_per_chunk), windows)
    previous, following = np.array(windows)[:, :-1].ravel(), np.array(windows)[:, 1:].ravel()
    p_NV, q_NV = (special.softmax(table.astype(np.float64), axis=-1)[previous] for table in (base_VV, cand_VV))
    kl_N = special.rel_entr(p_NV, q_NV).sum(-1)
    base_nll, cand_nll = (-np.log(x[np.arange(len(following)), following]).mean() for x in (p_NV, q_NV))
    assert named(result, "mean_kl").value == pytest.approx(kl_N.mean(), rel=1e-9)
    assert named(result, "perplexity_ratio").value == pytest.approx(math.exp(cand_nll - base_nll), rel=1e-9)
    assert named(result, "top1_agreement").value == pytest.approx((p_NV.argmax(-1) == q_NV.argmax(-1)).mean())
    assert (result.base_perplexity, result.cand_perplexity) == pytest.approx((math.exp(base_nll), math.exp(cand_nll)))
    assert result.p99_kl == pytest.approx(np.quantile(kl_N, 0.99))
    assert len(result.windows) == 6
    assert result.windows[2].row.max_kl == pytest.approx(kl_N.reshape(6, -1)[2].max())


def test_measurements_are_what_the_gate_accepts() -> None:
    result = measure_divergence(BigramEngine(random_table(1)), BigramEngine(near(random_table(1))), random_windows(8))
    for measurement in result.measurements:
        assert measurement_problem(measurement, num_expected=8) is None
        assert measurement.low < measurement.value < measurement.high


def test_a_model_against_itself_is_exactly_zero() -> None:
    result = measure_divergence(BigramEngine(random_table(1)), BigramEngine(random_table(1), 5), random_windows(8))
    kl, ratio, agreement = (named(result, n) for n in ("mean_kl", "perplexity_ratio", "top1_agreement"))
    assert (kl.value, kl.low, kl.high) == (0.0, 0.0, 0.0)
    assert (ratio.value, ratio.low, ratio.high) == (1.0, 1.0, 1.0)
    assert agreement.value == 1.0 == agreement.high
    assert 0.9 < agreement.low < 1.0  # certainty cannot be concluded from a sample


def test_kl_of_nearly_equal_models_is_never_negative() -> None:
    table_VV = random_table(3)
    noise_VV = np.random.default_rng(4).normal(size=table_VV.shape) * 1e-7
    result = measure_divergence(BigramEngine(table_VV), BigramEngine(table_VV + noise_VV), random_windows(4))
    assert named(result, "mean_kl").low >= 0.0
    assert all(each.row.mean_kl >= 0.0 for each in result.windows)


def test_lower_perplexity_does_not_hide_divergence() -> None:
    """A candidate that fits the text better than its baseline is still told apart by its KL."""
    base_VV, windows = random_table(5), random_windows(6)
    better_VV = base_VV.copy()
    for window in windows:
        better_VV[window[:-1], window[1:]] += 2.0
    result = measure_divergence(BigramEngine(base_VV), BigramEngine(better_VV), windows)
    assert named(result, "perplexity_ratio").high < 1.0
    assert named(result, "mean_kl").low > 0.01


def test_models_take_turns_so_that_one_chunk_of_each_is_held_at_a_time() -> None:
    order: list[str] = []

    class Noting(BigramEngine):
        def generate(self, prompts, params, prompt_logits_sinks=None):  # type: ignore[no-untyped-def]
            name = "base" if self.rows_per_chunk == 12 else "cand"

            def note(first: int, logits_RV: np.ndarray) -> None:
                order.append(f"{name} {first}")
                prompt_logits_sinks[0](first, logits_RV)

            return super().generate(prompts, params, [note])

    measure_divergence(Noting(random_table(1), 12), Noting(random_table(1), 8), random_windows(2))
    assert order == ["cand 0", "base 0", "cand 8", "base 12", "cand 16"] * 2


def test_logits_that_are_not_finite_name_the_model_and_the_place() -> None:
    broken_VV = random_table(1)
    broken_VV[7] = np.nan
    windows = [[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4]]
    with pytest.raises(
        DataError, match="window 1: candidate: 1 of 3 positions have no finite value, the first at position 2"
    ):
        measure_divergence(BigramEngine(random_table(1)), BigramEngine(broken_VV), windows)
    with pytest.raises(DataError, match="window 1: baseline"):
        measure_divergence(BigramEngine(broken_VV), BigramEngine(random_table(1)), windows)


def test_positions_without_logits_are_refused() -> None:
    class Skipping(BigramEngine):
        def generate(self, prompts, params, prompt_logits_sinks=None):  # type: ignore[no-untyped-def]
            prompt_logits_sinks[0](2, self.table_VV[list(prompts[0][2:])].astype(np.float32))
            return []

    whole, skipping = BigramEngine(random_table(1)), Skipping(random_table(1))
    with pytest.raises(
        DataError,
        match="window 0: baseline: 2 of 23 positions did not get one row",
    ):
        measure_divergence(skipping, whole, random_windows(2))
    with pytest.raises(DataError, match="window 0: candidate: 2 of 23 positions did not get one row"):
        measure_divergence(whole, skipping, random_windows(2))


def test_what_cannot_be_compared_is_refused_with_the_counts() -> None:
    engine = BigramEngine(random_table(1))
    with pytest.raises(DataError, match="1 windows of text"):
        measure_divergence(engine, engine, random_windows(1))
    with pytest.raises(DataError, match=r"windows of \[2, 3\] tokens"):
        measure_divergence(engine, engine, [[1, 2], [1, 2, 3]])
    with pytest.raises(DataError, match="vocabulary of 128 in the baseline, 64 in the candidate"):
        measure_divergence(engine, BigramEngine(random_table(1)[:, :64]), random_windows(2))


def test_documents_take_turns_and_windows_do_not_overlap(tmp_path: Path, codec: CharCodec) -> None:
    (tmp_path / "a.txt").write_text("aaaabbbbcc")
    (tmp_path / "b.txt").write_text("dddd")
    (tmp_path / "c.txt").write_text("eeeeffff")
    windows = windows_from_text(tmp_path, codec, num_windows=5, window_tokens=4)
    assert [codec.decode(window) for window in windows] == ["aaaa", "dddd", "eeee", "bbbb", "ffff"]
    assert windows_from_text(tmp_path / "a.txt", codec, 2, 4) == [windows[0], windows[3]]


def test_too_little_text_is_an_error_with_the_counts(tmp_path: Path, codec: CharCodec) -> None:
    (tmp_path / "a.txt").write_text("aaaabbbbcc")
    with pytest.raises(DataError, match="1 documents give 2 windows of 4 tokens; 3 are needed"):
        windows_from_text(tmp_path, codec, num_windows=3, window_tokens=4)
    with pytest.raises(DataError, match="not a text file or a folder"):
        windows_from_text(tmp_path / "missing", codec, 1, 1)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"b\.txt: cannot be read as UTF-8"):
        windows_from_text(tmp_path, codec, 1, 1)


def test_engines_give_transformers_perplexity_and_a_damaged_copy_diverges(random_llama: Callable[..., Path]) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    folder, damaged = random_llama(), random_llama()
    weights = load_file(damaged / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] *= 3
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    windows = random_windows(5, num_tokens=40)
    config = EngineConfig(num_threads=1, max_num_batched_tokens=16)  # a window comes in three chunks
    result = measure_divergence(Engine.open(folder, config), Engine.open(damaged, config), windows)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        loss = torch.stack([model(torch.tensor([w]), labels=torch.tensor([w])).loss for w in windows]).mean()
    assert result.base_perplexity == pytest.approx(math.exp(loss), rel=1e-3)
    assert named(result, "mean_kl").low > 0.0
