"""What the quantizer writes of a family is served: logits equal those of transformers on the reloaded artifact."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from architectures import VOCABULARY, MakeModel
from torch import Tensor

from quantpipe.backends import BACKENDS
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import SamplingParams
from quantpipe.formats.artifact import Artifact
from quantpipe.quantize.by_recipe import open_model, quantize_model
from quantpipe.quantize.writing import write_quantized
from quantpipe.recipe.quantize_section import QuantizeSection
from quantpipe.report import Reporter

MakeArtifact = Callable[[str, str], Path]

# Sliding layers see 8 tokens, so most of a probe lies beyond their window.
PROBE_IDS = np.random.default_rng(1).integers(3, VOCABULARY, 41).tolist()
CALIBRATION_IDS = np.random.default_rng(0).integers(3, VOCABULARY, (4, 32))
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "qwen3": {},
    "gemma3": {},
    "phi3": {"sliding_window": 8},
}
GROUPS = {"name": "w4a16", "group_size": 32}
METHODS: dict[str, dict[str, Any]] = {
    "w4 groups": {"solver": {"name": "rtn"}, "scheme": GROUPS},
    "w4 groups, zero points": {"solver": {"name": "rtn"}, "scheme": {**GROUPS, "symmetric": False}},
    "w3 awq, head in 8 bits": {
        "solver": {"name": "rtn"},
        "scheme": {**GROUPS, "name": "w3a16"},
        "transforms": [{"name": "awq"}],
        "overrides": [{"modules": ["lm_head"], "scheme": {"name": "w8a16"}}],
        "ignore": [],
    },
    "w8a8 smoothquant": {
        "solver": {"name": "rtn"},
        "scheme": {"name": "w8a8"},
        "transforms": [{"name": "smoothquant"}],
    },
    "w8a8, static keys and values": {"solver": {"name": "rtn"}, "scheme": {"name": "w8a8"}, "kv_cache": "int8_static"},
}


@pytest.fixture(scope="module")
def make_artifact(tiny_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> MakeArtifact:
    """Quantizes a tiny model as a run does; each once."""
    made: dict[tuple[str, str], Path] = {}

    def make(family: str, method: str) -> Path:
        if (family, method) not in made:
            section = QuantizeSection.model_validate(METHODS[method])
            model, folder = open_model(tiny_model(family, **FAMILIES[family])), tmp_path_factory.mktemp("made")
            done = quantize_model(section, model, CALIBRATION_IDS, folder / "work", "0", Reporter(quiet=True))
            scales = None if done.kv is None or done.kv.scales is None else done.kv.scales.tensors()
            sidecars = {} if scales is None else {"kv_scales.safetensors": scales}
            manifest = {"kv_cache": section.kv_cache}
            write_quantized(folder / "artifact", model, done.model, done.targets, manifest, sidecars)
            made[family, method] = folder / "artifact"
        return made[family, method]

    return make


@torch.inference_mode()
def reloaded(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    # zero points are read only so
    is_asymmetric = any(not scheme.symmetric for scheme in Artifact.open(folder).schemes.values())
    settings = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if is_asymmetric else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings).eval()
    logits_TV: Tensor = model(input_ids=torch.tensor([PROBE_IDS]), use_cache=False).logits[0]
    return logits_TV


def served(folder: Path, backend: str, kv_dtype: str | None, chunk: int) -> Tensor:
    rows: list[npt.NDArray[np.float32]] = []
    # transformers rounds activations by absmax / 127.5
    config = EngineConfig(
        backend=backend,
        kv_dtype=kv_dtype,
        block_size=4,
        max_num_seqs=1,
        max_num_batched_tokens=chunk,
        activation_divisor=127.5,
    )
    Engine.open(folder, config).generate(
        [PROBE_IDS],
        SamplingParams(max_tokens=0),
        prompt_logits_sinks=[lambda _first, logits_RV: rows.append(logits_RV.copy())],
    )
    return torch.from_numpy(np.concatenate(rows))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", [name for name in METHODS if "static" not in name])
@pytest.mark.parametrize("family", FAMILIES)
def test_served_logits_equal_those_of_the_reloaded_artifact(
    make_artifact: MakeArtifact, family: str, method: str, backend: str
) -> None:
    folder = make_artifact(family, method)
    expected = reloaded(folder)
    for chunk in (len(PROBE_IDS), 5):
        relative = float((served(folder, backend, "auto", chunk) - expected).norm() / expected.norm())
        # An activation on a rounding boundary may go either way; torch's 4-bit kernels round activations to bfloat16,
        # the compiled ones to 15 bits.
        exact = 1e-3 if backend == "cpu" else 0.02 if backend == "torch" and method.startswith("w4") else 1e-5
        bound = 2e-2 if method.startswith("w8a8") else exact
        assert relative < bound


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_are_rounded_by_the_scales_that_were_measured(
    make_artifact: MakeArtifact, family: str, backend: str
) -> None:
    folder = make_artifact(family, "w8a8, static keys and values")
    rounded, plain = (served(folder, backend, kv_dtype, len(PROBE_IDS)) for kv_dtype in (None, "auto"))
    # other text than the scales were measured on: a few values are clamped
    assert 1e-5 < (rounded - plain).norm() / plain.norm() < 0.05
