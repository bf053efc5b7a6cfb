"""transformers with compressed-tensors, a reader that shares no code with ours, loads artifacts of every scheme.

Shapes: S sequences, L tokens per sequence, T tokens, V vocabulary, D hidden size, N out_features, K in_features.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from quantpipe.formats.artifact import Artifact, verify
from quantpipe.formats.artifact_writer import QuantWeight, quantization_config, write_artifact
from quantpipe.formats.layout import absmax_scale, encode, minmax_scale, quantize_activations
from quantpipe.formats.scheme import WEIGHT_ONLY_BITS, WeightScheme, w4a16, w8a8, weight_only

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
TRANSFORMERS_DIVISOR = 127.5  # of activations rounded to 8 bits; what vLLM and we serve is 127
Schemes = Mapping[str, WeightScheme]


def rounded(weight_NK: torch.Tensor, scheme: WeightScheme) -> QuantWeight:
    scale_NG, zero_NG = absmax_scale(weight_NK, scheme, weight_NK.dtype), None
    if not scheme.symmetric:
        scale_NG, zero_NG = minmax_scale(weight_NK, scheme, weight_NK.dtype)
    return QuantWeight(encode(weight_NK, scale_NG, scheme, zero_NG), scale_NG, scheme, zero_NG)


def linears_of(base: Artifact) -> list[str]:
    return [name.removesuffix(".weight") for name in sorted(base.tensor_names()) if name.endswith("_proj.weight")]


def every_linear(scheme: WeightScheme) -> Callable[[list[str]], Schemes]:
    return lambda names: dict.fromkeys(names, scheme)


def mixed(names: list[str]) -> Schemes:
    """Two schemes stored as words and one as bytes; one linear stays as it is."""
    by_leaf = {"down_proj": weight_only(8, None), "gate_proj": w8a8(), "up_proj": w8a8()}
    kept = [name for name in names if name != "model.layers.1.self_attn.o_proj"]
    return {name: by_leaf.get(name.rpartition(".")[2], w4a16(32)) for name in kept}


def with_head(names: list[str]) -> Schemes:
    return {**dict.fromkeys(names, w4a16(32)), HEAD: weight_only(8, None)}


def write(base: Artifact, target: Path, schemes: Schemes) -> Mapping[str, QuantWeight]:
    """An artifact of ``base``; a head that is tied to the embedding is untied."""
    is_untied = HEAD in schemes and f"{HEAD}.weight" not in base.stored
    stored_as = {HEAD: EMBEDDING} if is_untied else {}
    weights = {
        name: rounded(base.tensor(f"{stored_as.get(name, name)}.weight"), scheme) for name, scheme in schemes.items()
    }
    ignore = [name for name in [*linears_of(base), HEAD] if name not in schemes]
    updates = {"tie_word_embeddings": False} if is_untied else {}
    artifact = write_artifact(target, base, weights, quantization_config(schemes, ignore), {}, config_updates=updates)
    assert verify(target) == []
    assert artifact.schemes == dict(schemes)
    return weights


def round_input(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    x = args[0]
    q_TK, scale_T1 = quantize_activations(x.reshape(-1, x.shape[-1]), TRANSFORMERS_DIVISOR)
    return ((q_TK * scale_T1).reshape(x.shape),)


@torch.no_grad()
def expected_logits(base: Artifact, weights: Mapping[str, QuantWeight], ids_SL: torch.Tensor) -> torch.Tensor:
    """The base model with each weight replaced by what our own decoder makes of its integers."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(base.folder, dtype=torch.float32).eval()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())  # untied, should it have been tied
    for name, weight in weights.items():
        linear = model.get_submodule(name)
        linear.weight.copy_(weight.dequantized())
        if weight.scheme.activation_bits is not None:
            linear.register_forward_pre_hook(round_input)
    logits_SLV: torch.Tensor = model(input_ids=ids_SL).logits
    return logits_SLV


@pytest.fixture
def ids_SL() -> torch.Tensor:
    return (torch.arange(40) * 7 % 128).unsqueeze(0)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def base(request: pytest.FixtureRequest, random_llama: Callable[..., Path]) -> Artifact:
    return Artifact.open(random_llama(request.param, intermediate_size=96))


CASES = {
    "w4a16 channel": every_linear(weight_only(4, None)),
    "w8a16 channel": every_linear(weight_only(8, None)),
    "w3a16 g32": every_linear(weight_only(3, 32)),
    "w3a16 channel": every_linear(weight_only(3, None)),
    "mixed": mixed,
    "head": with_head,
}


@pytest.mark.parametrize("choose", CASES.values(), ids=CASES)
def test_loaded_logits_equal_those_of_our_own_decoder(
    base: Artifact, tmp_path: Path, ids_SL: torch.Tensor, choose: Callable[[list[str]], Schemes]
) -> None:
    from transformers import AutoModelForCausalLM

    weights = write(base, tmp_path / "artifact", choose(linears_of(base)))
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "artifact", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        found = loaded.eval()(input_ids=ids_SL).logits
    # the same float32 operations on the same weights; only the order of a sum may differ
    assert torch.allclose(found, expected_logits(base, weights, ids_SL), atol=1e-5)


def test_head_that_stays_as_it_is_beside_an_untied_embedding_is_stored(
    random_llama: Callable[..., Path], tmp_path: Path, ids_SL: torch.Tensor
) -> None:
    from transformers import AutoModelForCausalLM

    base = Artifact.open(random_llama())
    head_VD = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    updates = {"tie_word_embeddings": False}
    artifact = write_artifact(
        tmp_path / "artifact", base, {}, None, {}, added={f"{HEAD}.weight": head_VD}, config_updates=updates
    )
    assert verify(artifact.folder) == []
    loaded = AutoModelForCausalLM.from_pretrained(artifact.folder, dtype=torch.float32)
    assert torch.equal(loaded.lm_head.weight, head_VD)
    assert torch.equal(loaded.model.embed_tokens.weight, base.tensor(f"{EMBEDDING}.weight"))


@pytest.mark.parametrize("bits", WEIGHT_ONLY_BITS)
def test_zero_points_are_read_when_weights_are_decompressed_on_load(
    random_llama: Callable[..., Path], tmp_path: Path, ids_SL: torch.Tensor, bits: int
) -> None:
    """That reader takes zero points only so: without ``dequantize`` it expects them unpacked."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    base = Artifact.open(random_llama())
    scheme = weight_only(bits, 32, symmetric=False)
    weights = write(base, tmp_path / "artifact", dict.fromkeys(linears_of(base), scheme))
    zeros = torch.cat([weight.zero_NG.flatten() for weight in weights.values() if weight.zero_NG is not None])
    assert {-1, 0, 1} <= set(zeros.tolist())
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "artifact", dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    with torch.no_grad():
        found = loaded.eval()(input_ids=ids_SL).logits
    assert torch.allclose(found, expected_logits(base, weights, ids_SL), atol=1e-5)
