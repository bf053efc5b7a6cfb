"""Whole steps of the compiled kernels: every family and cache mode against the reference; greedy tokens."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantpipe.backends.cpu.native.executor import NativeExecutor, load_native
from quantpipe.backends.cpu.native.library import Library
from quantpipe.backends.protocol import BatchInput
from quantpipe.backends.reference import ReferenceBackend
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.kv_mode import KV_MODES
from quantpipe.models import describe

MakeFolder = Callable[..., Path]
MakeBatch = Callable[..., BatchInput]

BLOCK_SIZE = 16
# Float32 sums in another order: about 1e-6 of the largest logit, which is near 10 here.
FLOAT32_NOISE = 5e-5
# A key or value on a rounding boundary may go either way, by a step of its mode, in a few.
NOISE = {"auto": FLOAT32_NOISE, "int8_per_token_head": 0.02, "int8_static": 0.02, "k_int8_v_int4": 0.3}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 48},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 48,
        "query_pre_attn_scalar": 40,
        "sliding_window": 9,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    "phi3": {"model_type": "phi3", "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}},
}


def load(folder: Path, num_threads: int = 1) -> NativeExecutor:
    artifact = Artifact.open(folder)
    return load_native(artifact, describe(artifact), 127.0, num_threads, "float32")


def ids(num_tokens: int, seed: int) -> list[int]:
    drawn: list[int] = torch.randint(0, 96, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


def two_steps(make_batch: MakeBatch) -> list[BatchInput]:
    """Two prompts; then the rest of one, a decode of the other, and a third sequence, over blocks in no order."""
    first, second, third = ids(40, 0), ids(9, 1), ids(3, 2)
    return [
        make_batch([(first[:21], 0, (5, 1, 3)), (second, 0, (0,))], BLOCK_SIZE),
        make_batch([(first[21:], 21, (5, 1, 3)), ([7], 9, (0,)), (third, 0, (2,))], BLOCK_SIZE, rows=(18, 19, 22)),
    ]


@pytest.mark.parametrize("kv_dtype", NOISE)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_the_reference(
    library: Library, family: str, kv_dtype: str, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    folder = make_folder(**FAMILIES[family])
    executors = (load(folder), ReferenceBackend().load(folder, 127.0, None))
    caches = [executor.allocate_kv_cache(8, BLOCK_SIZE, kv_dtype) for executor in executors]
    for batch in two_steps(make_batch):
        found, expected = (executor.forward(batch, cache) for executor, cache in zip(executors, caches, strict=True))
        torch.testing.assert_close(found, expected, rtol=0, atol=NOISE[kv_dtype])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_instruction_set_gives_the_same_logits(
    instruction_set: str, family: str, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    folder = make_folder(**FAMILIES[family])
    executors = (load(folder), ReferenceBackend().load(folder, 127.0, None))
    batch = two_steps(make_batch)[0]
    found, expected = (
        executor.forward(batch, executor.allocate_kv_cache(8, BLOCK_SIZE, "auto")) for executor in executors
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=FLOAT32_NOISE)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_embedding_that_is_the_head_is_held_once(
    library: Library, dtype: torch.dtype, make_folder: MakeFolder, make_batch: MakeBatch, tmp_path: Path
) -> None:
    folder = tmp_path / "tied"
    shutil.copytree(make_folder(**FAMILIES["gemma3"]), folder)  # its embedding is scaled, too
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    executor, reference = load(folder), ReferenceBackend().load(folder, 127.0, None)
    batch = two_steps(make_batch)[0]
    logits_RV = executor.forward(batch, executor.allocate_kv_cache(8, BLOCK_SIZE, "auto"))
    expected_RV = reference.forward(batch, reference.allocate_kv_cache(8, BLOCK_SIZE, "auto"))
    torch.testing.assert_close(logits_RV, expected_RV, rtol=0, atol=FLOAT32_NOISE)
    linears = executor.description.linears()  # the head is one of them
    held_elsewhere = sum(4 * norm.size for norm in executor.description.norms())
    bytes_each = 2 if dtype is torch.bfloat16 else 4
    num_weights = sum(spec.out_features * spec.in_features for spec in linears)
    # Channels are filled up to panels of 32, and each has a bias of four bytes.
    num_padded = sum(-(-spec.out_features // 32) * 32 for spec in linears)
    assert executor.weight_bytes <= bytes_each * num_weights + 4 * num_padded + held_elsewhere


@pytest.mark.parametrize("kv_dtype", KV_MODES)
def test_threads_change_nothing(
    library: Library, kv_dtype: str, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    executors = [load(make_folder(), num_threads) for num_threads in (1, 3)]
    caches = [executor.allocate_kv_cache(8, BLOCK_SIZE, kv_dtype) for executor in executors]
    for batch in two_steps(make_batch):
        alone, shared = (executor.forward(batch, cache) for executor, cache in zip(executors, caches, strict=True))
        assert torch.equal(alone, shared)


@pytest.mark.parametrize("num_threads", (1, 3))
@pytest.mark.parametrize("vocab_size", (96, 512, 1501))
def test_greedy_tokens_are_the_largest_logits(
    instruction_set: str, vocab_size: int, num_threads: int, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    executor = load(make_folder(vocab_size=vocab_size), num_threads)
    batch = make_batch([(ids(125, 0), 0, range(8)), ([5], 0, (9,))], BLOCK_SIZE)
    logits_RV = executor.forward(batch, executor.allocate_kv_cache(10, BLOCK_SIZE, "auto"))
    token_ids_R = executor.forward_greedy(batch, executor.allocate_kv_cache(10, BLOCK_SIZE, "auto"))
    assert token_ids_R.tolist() == logits_RV.argmax(-1).tolist()


def test_a_broken_token_has_no_greedy_successor(
    library: Library, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    executor = load(make_folder(nan_token=5, vocab_size=1501))
    batch = make_batch([([1, 2], 0, (0,)), ([5], 0, (1,)), ([3, 4], 0, (2,))], BLOCK_SIZE)
    token_ids = executor.forward_greedy(batch, executor.allocate_kv_cache(8, BLOCK_SIZE, "auto")).tolist()
    assert [token_id >= 0 for token_id in token_ids] == [True, True, False, True, True]


def test_time_is_kept_of_every_part(library: Library, make_folder: MakeFolder, make_batch: MakeBatch) -> None:
    executor = load(make_folder())
    executor.forward(two_steps(make_batch)[0], executor.allocate_kv_cache(8, BLOCK_SIZE, "auto"))
    assert all(seconds > 0 for seconds in executor.step_times_s.values())
