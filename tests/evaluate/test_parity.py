from pathlib import Path

import pytest
import torch

from quantpipe.engine.config import EngineConfig
from quantpipe.errors import ArtifactError
from quantpipe.evaluate.parity import check_parity, mean_kl, require_parity
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.artifact_writer import QuantWeight, quantization_config, write_artifact
from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8
from quantpipe.gate.report import ParityRow
from quantpipe.quantize.discover import find_blocks, find_targets
from quantpipe.quantize.loading import load_base_model
from quantpipe.quantize.rtn import solve_rtn
from quantpipe.quantize.sequential import QuantizedModel, quantize_blocks
from quantpipe.report import no_progress

CONFIG = EngineConfig(num_threads=1)


def rounded(model: torch.nn.Module, scheme: WeightScheme) -> QuantizedModel:
    blocks = find_blocks(model)
    targets = find_targets(model, blocks, ["lm_head"], scheme)
    return quantize_blocks(model, blocks, targets, scheme, solve_rtn, None, None, no_progress)


@pytest.mark.parametrize("scheme", [w4a16(32), w8a8()], ids=lambda s: s.name)
def test_three_ways_agree_for_a_sound_artifact(tiny_llama: Path, tmp_path: Path, scheme: WeightScheme) -> None:
    model = load_base_model(tiny_llama)
    quantized = rounded(model, scheme)
    weights = quantized.weights
    declared = quantization_config(dict.fromkeys(weights, scheme), ["lm_head"])
    write_artifact(tmp_path / "artifact", Artifact.open(tiny_llama), weights, declared, {})
    rows = check_parity(model, quantized, tiny_llama, tmp_path / "artifact", CONFIG)
    assert len(rows) == 4
    require_parity(rows, tmp_path)


@pytest.mark.parametrize("scheme", [w4a16(32), w8a8()], ids=lambda s: s.name)
def test_artifact_that_stores_other_weights_is_refused(tiny_llama: Path, tmp_path: Path, scheme: WeightScheme) -> None:
    model = load_base_model(tiny_llama)
    quantized = rounded(model, scheme)
    weights = quantized.weights
    name = "model.layers.3.mlp.up_proj"
    wrong = QuantWeight(weights[name].q_NK.flip(1), weights[name].scale_NG, scheme)
    declared = quantization_config(dict.fromkeys(weights, scheme), ["lm_head"])
    write_artifact(tmp_path / "artifact", Artifact.open(tiny_llama), {**weights, name: wrong}, declared, {})
    rows = check_parity(model, quantized, tiny_llama, tmp_path / "artifact", CONFIG)
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
