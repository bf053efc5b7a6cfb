"""Every backend computes the logits of transformers for every family, also where a window hides what is far back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quantpipe.backends import BACKENDS
from quantpipe.backends.protocol import BatchInput, Executor
from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8, weight_only
from quantpipe.models import FAMILIES

MakeFolder = Callable[..., Path]
MakeBatch = Callable[..., BatchInput]

BLOCK_SIZE = 4
# Float32 sums in another order: about 1e-6 of the largest logit, which is near 10 here.
FLOAT32_NOISE = 5e-5
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
# Pairs turn by these factors slower within the original context and beyond it.
LONG_FACTORS = {
    name: [1.0 + step * pair for pair in range(12)] for name, step in (("short_factor", 0.1), ("long_factor", 2))
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, **LONG_FACTORS}
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "head_dim": 48,
    "query_pre_attn_scalar": 40,
    "sliding_window": 9,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
}
DECODERS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "one KV head": {"num_key_value_heads": 1},
    "as many KV heads": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 64},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "llama3 rope": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    "yarn rope": {"rope_parameters": YARN},
    "dynamic rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "mistral": {"model_type": "mistral"},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 7},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 with a window in one layer": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 48, "attention_bias": True},
    "gemma3": GEMMA3,
    "gemma3 stretched": {
        **GEMMA3,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    },
    "phi3": {"model_type": "phi3"},
    "phi3 with a window": {"model_type": "phi3", "sliding_window": 11},
    "phi3 turned in part": {"model_type": "phi3", "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}},
    "phi3 longrope": {"model_type": "phi3", "original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
}
WINDOWED = [name for name, settings in DECODERS.items() if settings.get("sliding_window") is not None]
SCHEMES: dict[str, WeightScheme] = {
    scheme.label: scheme for scheme in (w4a16(32), weight_only(3, 64, symmetric=False), w8a8())
}


def load(backend: str, folder: Path) -> Executor:
    return BACKENDS[backend]().load(folder, activation_divisor=127.0, num_threads=None)


def random_ids(num_tokens: int, seed: int = 0) -> list[int]:
    ids: list[int] = torch.randint(0, 96, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def in_steps(executor: Executor, make_batch: MakeBatch, ids: list[int], sizes: tuple[int, ...]) -> Tensor:
    """Logits of every token, read in chunks of these sizes over blocks in reversed order."""
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    kv = executor.allocate_kv_cache(num_blocks, BLOCK_SIZE, "auto")
    rows, start = [], 0
    for size in sizes:
        part = (ids[start : start + size], start, range(num_blocks)[::-1])
        rows.append(executor.forward(make_batch([part], BLOCK_SIZE), kv))
        start += size
    assert start == len(ids)
    return torch.cat(rows)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_equal_those_of_transformers(
    backend: str, decoder: str, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    folder = make_folder(**DECODERS[decoder])
    ids = random_ids(61)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    found = in_steps(load(backend, folder), make_batch, ids, (61,))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=FLOAT32_NOISE)


@pytest.mark.parametrize("decoder", [*WINDOWED, "qwen3", "phi3 longrope"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_and_decodes_equal_one_dense_step(
    backend: str, decoder: str, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    executor, ids = load(backend, make_folder(**DECODERS[decoder])), random_ids(31)
    found = in_steps(executor, make_batch, ids, (4, 1, 9, 1, 1, 12, 1, 1, 1))
    torch.testing.assert_close(found, in_steps(executor, make_batch, ids, (31,)), rtol=0, atol=FLOAT32_NOISE)


@pytest.mark.parametrize("decoder", WINDOWED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_step_equals_each_sequence_alone(
    backend: str, decoder: str, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    executor = load(backend, make_folder(**DECODERS[decoder]))
    # (length so far, new tokens): contexts below, at and above the windows
    shapes = [(3, 1), (30, 1), (0, 20), (10, 1), (6, 3), (25, 3), (0, 5)]
    kv = executor.allocate_kv_cache(64, BLOCK_SIZE, "auto")
    parts, expected, free = [], [], list(range(64))
    for seed, (num_cached, num_new) in enumerate(shapes):
        ids = random_ids(num_cached + num_new, seed)
        blocks = [free.pop() for _ in range(-(-len(ids) // BLOCK_SIZE))]
        if num_cached:
            executor.forward(make_batch([(ids[:num_cached], 0, blocks)], BLOCK_SIZE), kv)
        parts.append((ids[num_cached:], num_cached, blocks))
        expected.append(in_steps(executor, make_batch, ids, (len(ids),))[num_cached:])
    found = executor.forward(make_batch(parts, BLOCK_SIZE), kv)
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=FLOAT32_NOISE)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("decoder", ["qwen3", "gemma3", "phi3"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_quantized_weights_mean_what_they_decode_to(
    backend: str, decoder: str, scheme: str, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    quantized, decoded = (make_folder(SCHEMES[scheme], decoded=flag, **DECODERS[decoder]) for flag in (False, True))
    ids = random_ids(40)
    expected = in_steps(load("reference", decoded), make_batch, ids, (40,))
    found = in_steps(load(backend, quantized), make_batch, ids, (40,))
    # w8a8 rounds activations to 8 bits (one part in 127 of the largest of each token, 8 times in a row here), torch's
    # 4-bit kernels to bfloat16, the compiled ones under any weights to 15 bits; what is left is exact.
    exact = 3e-4 if backend == "cpu" else 1e-5
    bound = {"w8a8": 0.06, "w4a16": 0.02 if backend == "torch" else exact, "w3a16": exact}[SCHEMES[scheme].name]
    assert (found - expected).norm() / expected.norm() < bound


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_context_that_a_rope_limits_is_told_of(backend: str, make_folder: MakeFolder) -> None:
    executor = load(backend, make_folder(**DECODERS["phi3 longrope"]))
    assert executor.description.max_position_embeddings == 64
    assert executor.notes[0].startswith("rope: contexts end at 64 of 256 positions")


def test_every_family_is_among_the_decoders() -> None:
    assert {settings.get("model_type", "llama") for settings in DECODERS.values()} == FAMILIES.keys()
