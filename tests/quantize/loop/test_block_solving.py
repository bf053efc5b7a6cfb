import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quantpipe.formats.scheme import w4a16
from quantpipe.quantize.kv_int8 import KVLayerRecord, KVObserver
from quantpipe.quantize.loop.sequential import Method, quantize_blocks
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.model.watched_attention import watched_attention
from quantpipe.quantize.solvers.gptq import solve_gptq
from quantpipe.quantize.solvers.rtn import solve_rtn
from quantpipe.quantize.solvers.solver import Solution, SolverInput, SolverOptions
from quantpipe.quantize.targets.discover import find_targets
from quantpipe.report import no_progress

NEAREST = Method([], solve_rtn, SolverOptions(scales="absmax"))
GPTQ = Method([], solve_gptq, reads_data=True)


@pytest.fixture
def token_ids(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Three batches."""
    monkeypatch.setattr("quantpipe.quantize.model.block_runs.TOKENS_PER_BATCH", 64)
    return np.random.default_rng(0).integers(3, 128, (6, 32))


def observed(folder: Path, work_folder: Path, token_ids: np.ndarray, method: Method) -> tuple[KVLayerRecord, ...]:
    model = StreamedModel.open(folder, attention=watched_attention())
    targets = find_targets(model.module, model.blocks, ["lm_head"], w4a16(32))
    watching = replace(method, kv=KVObserver("int8_static"))
    return quantize_blocks(model, targets, watching, token_ids, work_folder, "fingerprint", no_progress).kv


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("propagate", ["quantized", "full", "both"])
def test_each_token_is_observed_once_however_often_a_pass_is_repeated(
    random_llama: Callable[..., Path],
    tmp_path: Path,
    token_ids: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    sequential: bool,
    propagate: str,
) -> None:
    folder = random_llama()
    method = replace(GPTQ, sequential=sequential, propagate=propagate)  # type: ignore[arg-type]
    kept = observed(folder, tmp_path / "kept", token_ids, method)
    monkeypatch.setattr("quantpipe.quantize.loop.block_solving.MAX_SUSPENDED_BYTES", 1)
    repeated = observed(folder, tmp_path / "repeated", token_ids, method)
    assert kept == repeated
    assert [(record.layer, record.num_tokens) for record in kept] == [(0, 192), (1, 192)]


def test_attention_of_documents_packed_apart_is_that_of_each_alone(
    random_llama: Callable[..., Path], tmp_path: Path, token_ids: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest keys and values of a document do not depend on what stands before it; nor do the errors."""
    monkeypatch.setattr("quantpipe.quantize.model.block_runs.TOKENS_PER_BATCH", 32)  # every sequence is sampled
    model = StreamedModel.open(random_llama(), attention=watched_attention())
    targets = find_targets(model.module, model.blocks, ["lm_head"], w4a16(32))
    ids, positions = token_ids.reshape(3, 64), np.tile(np.arange(32), (3, 2))
    packed, alone = (
        quantize_blocks(model, targets, watching, each, tmp_path / str(each.shape), "0", no_progress, apart).kv
        for watching, each, apart in (
            (replace(NEAREST, kv=KVObserver("int8_static")), ids, positions),
            (replace(NEAREST, kv=KVObserver("int8_static")), token_ids, None),
        )
    )
    for one, other in zip(packed, alone, strict=True):
        assert one.num_tokens == other.num_tokens == 192
        assert one.key_absmax == pytest.approx(other.key_absmax, rel=1e-5)
        assert one.value_absmax == pytest.approx(other.value_absmax, rel=1e-5)
        assert one.errors == pytest.approx(other.errors, rel=1e-3)


def test_attention_is_observed_without_a_solver_that_reads_data(
    random_llama: Callable[..., Path], tmp_path: Path, token_ids: np.ndarray
) -> None:
    records = observed(random_llama(), tmp_path, token_ids, NEAREST)
    assert [record.num_tokens for record in records] == [192, 192]


def test_what_was_observed_survives_an_interruption(
    random_llama: Callable[..., Path], tmp_path: Path, token_ids: np.ndarray
) -> None:
    folder = random_llama()
    whole = observed(folder, tmp_path / "whole", token_ids, GPTQ)
    calls = []

    def solve(given: SolverInput) -> Solution:
        calls.append(given)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return solve_gptq(given)

    num_threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        observed(folder, tmp_path / "cut", token_ids, replace(GPTQ, solver=solve))
    assert observed(folder, tmp_path / "cut", token_ids, GPTQ) == whole
    assert threading.active_count() == num_threads


def test_full_propagation_hands_on_what_the_original_block_gives_out(
    random_llama: Callable[..., Path], tmp_path: Path, token_ids: np.ndarray
) -> None:
    """Then the second block is solved on the same statistics, whatever became of the first."""
    folder = random_llama()
    seen: list[list[torch.Tensor]] = []
    for bits in (4, 3):
        hessians: list[torch.Tensor] = []

        def solve(given: SolverInput, bits: int = bits, hessians: list[torch.Tensor] = hessians) -> Solution:
            assert given.statistics is not None
            hessians.append(given.statistics.hessian_KK.clone())
            solution = solve_rtn(replace(given, options=NEAREST.options))
            return replace(solution, q_NK=solution.q_NK // (5 - bits))

        model = StreamedModel.open(folder)
        targets = find_targets(model.module, model.blocks, ["lm_head"], w4a16(32))
        method = Method([], solve, reads_data=True, propagate="full")
        quantize_blocks(model, targets, method, token_ids, tmp_path / str(bits), "fingerprint", no_progress)
        seen.append(hessians)
    assert torch.equal(seen[0][4], seen[1][4])  # q, k and v of the second block
    assert not torch.equal(seen[0][5], seen[1][5])  # o after them
