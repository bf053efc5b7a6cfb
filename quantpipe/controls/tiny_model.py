"""A small model written on the spot, and artifacts of it of every kind, for controls that need nothing else.

Its weights are random: what counts is how far a damaged copy's predictions are from its own.
"""

import inspect
import json
import textwrap
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file

from quantpipe.backends.protocol import BatchInput
from quantpipe.backends.reference import ReferenceBackend
from quantpipe.backends.reference_kv_cache import ReferenceKVStore
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.artifact_writer import QuantWeight, quantization_config, write_artifact
from quantpipe.formats.digests import KV_SCALES_NAME
from quantpipe.formats.kv_mode import kv_mode
from quantpipe.formats.kv_rounding import static_scale
from quantpipe.formats.kv_scales import KVScales
from quantpipe.formats.layout import absmax_scale, encode, minmax_scale
from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8, weight_only

VOCAB_SIZE, HIDDEN, INNER, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS = 512, 128, 256, 4, 4, 2
# As in models that have learnt: rows of a weight differ in magnitude, and activations do not average to zero.
ROW_SPREAD, OFFSET, GAIN = 0.7, 0.3, 0.6
EMBEDDING = "model.embed_tokens"
BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
WINDOW_TOKENS, NUM_WINDOWS = 64, 16


@dataclass(frozen=True)
class Kind:
    """A kind of artifact: the schemes of even and odd layers, the KV cache, and the largest mean KL that passes."""

    schemes: tuple[WeightScheme, WeightScheme]
    kv_cache: str
    max_kl: float


KINDS: Mapping[str, Kind] = {
    "w8a8": Kind((w8a8(), w8a8()), "auto", 0.0022),
    "w8a8, KV int8_static": Kind((w8a8(), w8a8()), "int8_static", 0.003),
    "w8a8, KV int8_per_token_head": Kind((w8a8(), w8a8()), "int8_per_token_head", 0.0022),
    "w8a16 channel": Kind((weight_only(8, None), weight_only(8, None)), "auto", 0.0015),
    "w4a16 g32": Kind((w4a16(32), w4a16(32)), "auto", 0.3),
    "w4a16 g32 asymmetric": Kind((weight_only(4, 32, False), weight_only(4, 32, False)), "auto", 0.4),
    "w3a16 g32": Kind((weight_only(3, 32), weight_only(3, 32)), "auto", 0.78),
    "w4a16 g32 and w8a8": Kind((w4a16(32), w8a8()), "auto", 0.25),
}


def corpus() -> str:
    """A few thousand words of English and code that every Python has."""
    return inspect.getsource(textwrap) + inspect.getsource(ArgumentParser)


def write_base(folder: Path) -> Path:
    """Write the model with its tokenizer and chat template to ``folder``, and return it."""
    folder.mkdir(parents=True)
    _write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(_config()))
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{name}.weight": torch.ones(HIDDEN) for name in _norms()}
    for name, (shape, spread) in _linears().items():
        rows_N1 = torch.randn(shape[0], 1, generator=generator).mul(ROW_SPREAD).exp()
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator) * rows_N1 * spread
    embedding = f"{EMBEDDING}.weight"
    tensors[embedding] = 0.15 * torch.randn(VOCAB_SIZE, HIDDEN, generator=generator) + OFFSET
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def windows_of(folder: Path) -> list[list[int]]:
    """Windows of text for a model folder's tokenizer."""
    token_ids = Tokenizer.open(folder).encode(corpus())
    return [token_ids[n * WINDOW_TOKENS : (n + 1) * WINDOW_TOKENS] for n in range(NUM_WINDOWS)]


def write_kind(kind: Kind, base_folder: Path, folder: Path) -> Path:
    """Write the artifact of this kind that rounding to nearest makes of the model, and return its folder."""
    base = Artifact.open(base_folder)
    weights = {
        name: _rounded(base.tensor(f"{name}.weight"), kind.schemes[int(name.split(".")[2]) % 2]) for name in _linears()
    }
    declared = quantization_config({name: weight.scheme for name, weight in weights.items()}, ["lm_head"])
    sidecars = {}
    if kv_mode(kind.kv_cache, "kv_cache").needs_scales:
        sidecars[KV_SCALES_NAME] = _kv_scales(base_folder).tensors()
    return write_artifact(folder, base, weights, declared, {"kv_cache": kind.kv_cache}, sidecars=sidecars).folder


def _rounded(weight_NK: torch.Tensor, scheme: WeightScheme) -> QuantWeight:
    if scheme.symmetric:
        scale_NG = absmax_scale(weight_NK, scheme, torch.float32)
        return QuantWeight(encode(weight_NK, scale_NG, scheme), scale_NG, scheme)
    scale_NG, zero_NG = minmax_scale(weight_NK, scheme, torch.float32)
    return QuantWeight(encode(weight_NK, scale_NG, scheme, zero_NG), scale_NG, scheme, zero_NG)


def _kv_scales(folder: Path) -> KVScales:
    """Those that cover the keys and values of a window."""
    token_ids = torch.tensor(windows_of(folder)[0])
    executor = ReferenceBackend().load(folder, 127.0, None)
    positions = torch.arange(len(token_ids))
    lens, table = (len(token_ids),), torch.zeros(1, 1, dtype=torch.int64)
    kv_cache = executor.allocate_kv_cache(1, len(token_ids), "auto")
    executor.forward(BatchInput(token_ids, positions, positions, lens, lens, table, positions[-1:]), kv_cache)

    def scales(stores: Sequence[ReferenceKVStore]) -> tuple[torch.Tensor, ...]:
        return tuple(static_scale(store.codes.abs().amax((0, 1, 3))) for store in stores)

    return KVScales(scales(kv_cache.keys), scales(kv_cache.values))


def _write_tokenizer(folder: Path) -> None:
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator([corpus()], trainer)
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": EOS}))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _config() -> dict[str, object]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    }


def _norms() -> list[str]:
    names = ("input_layernorm", "post_attention_layernorm")
    return ["model.norm", *(f"model.layers.{layer}.{name}" for layer in range(NUM_LAYERS) for name in names)]


def _linears() -> dict[str, tuple[tuple[int, int], float]]:
    """Shapes and spreads of the decoder's linears: each layer adds about as much as it reads."""
    kv_size = HIDDEN * NUM_KV_HEADS // NUM_HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv_size, HIDDEN),
        "self_attn.v_proj": (kv_size, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    found: dict[str, tuple[tuple[int, int], float]] = {}
    for layer in range(NUM_LAYERS):
        found |= {f"model.layers.{layer}.{name}": (shape, GAIN * shape[1] ** -0.5) for name, shape in shapes.items()}
    return found
