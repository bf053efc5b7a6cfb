from pathlib import Path
from typing import Any

import pytest
import torch

from quantpipe.engine.config import EngineConfig
from quantpipe.errors import ArtifactError
from quantpipe.evaluate.parity import check_parity, mean_kl, memory_shortage, require_parity
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.artifact_writer import QuantWeight, quantization_config, write_artifact
from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8
from quantpipe.gate.report import ParityRow
from quantpipe.quantize.loop.sequential import Method, QuantizedModel, quantize_blocks
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.solvers.rtn import solve_rtn
from quantpipe.quantize.solvers.solver import SolverOptions
from quantpipe.quantize.targets.discover import find_targets
from quantpipe.report import no_progress

CONFIG = EngineConfig(num_threads=1)
NEAREST = SolverOptions(scales="absmax")


def rounded(folder: Path, scheme: WeightScheme, work_folder: Path) -> QuantizedModel:
    model = StreamedModel.open(folder)
    targets = find_targets(model.module, model.blocks, ["lm_head"], scheme)
    return quantize_blocks(model, targets, Method([], solve_rtn, NEAREST), None, work_folder, "work", no_progress)


def declared(quantized: QuantizedModel) -> dict[str, Any]:
    return quantization_config({name: weight.scheme for name, weight in quantized.weights.items()}, ["lm_head"])


@pytest.mark.parametrize("scheme", [w4a16(32), w8a8()], ids=lambda s: s.name)
def test_three_ways_agree_for_a_sound_artifact(tiny_llama: Path, tmp_path: Path, scheme: WeightScheme) -> None:
    quantized = rounded(tiny_llama, scheme, tmp_path)
    write_artifact(tmp_path / "artifact", Artifact.open(tiny_llama), quantized.weights, declared(quantized), {})
    rows = check_parity(quantized, tiny_llama, tmp_path / "artifact", CONFIG)
    assert len(rows) == 4
    require_parity(rows, tmp_path)


@pytest.mark.parametrize("scheme", [w4a16(32), w8a8()], ids=lambda s: s.name)
def test_artifact_that_stores_other_weights_is_refused(tiny_llama: Path, tmp_path: Path, scheme: WeightScheme) -> None:
    quantized = rounded(tiny_llama, scheme, tmp_path)
    weights = quantized.weights
    name = "model.layers.3.mlp.up_proj"
    wrong = QuantWeight(weights[name].q_NK.flip(1), weights[name].scale_NG, scheme)
    base = Artifact.open(tiny_llama)
    write_artifact(tmp_path / "artifact", base, {**weights, name: wrong}, declared(quantized), {})
    rows = check_parity(quantized, tiny_llama, tmp_path / "artifact", CONFIG)
    assert [row.agrees for row in rows] == [True, False, False, False]
    with pytest.raises(ArtifactError, match="must not be released"):
        require_parity(rows, tmp_path)


def test_nan_never_agrees() -> None:
    assert not ParityRow("broken", float("nan"), 1.0).agrees
    assert mean_kl(torch.zeros(2, 3), torch.full((2, 3), torch.nan)) == float("inf")
    assert mean_kl(torch.zeros(2, 3), torch.zeros(2, 4)) == float("inf")


def test_divergence_of_equal_logits_is_zero_and_ignores_a_constant() -> None:
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    assert mean_kl(logits, logits + 3) == pytest.approx(0, abs=1e-9)
    assert mean_kl(logits, logits * 2) > 0


def test_memory_that_parity_takes_is_counted_in_float32_whatever_the_weights_are_stored_in(tiny_llama: Path) -> None:
    base = Artifact.open(tiny_llama)
    num_weights = sum(base.tensor(name).numel() for name in base.stored)
    needed = int(6 * num_weights)
    assert memory_shortage(base, needed) is None
    shortage = memory_shortage(base, needed - 1)
    assert shortage is not None
    assert shortage.startswith(f"parity needs about {needed / 1e9:.2f} GB of memory")
