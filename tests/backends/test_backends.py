"""Every backend meets the same contract: the same logits, however the tokens are cut, mixed and laid out."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quantpipe.backends import BACKENDS
from quantpipe.backends.protocol import Activations, BatchInput, Executor, KVCache
from quantpipe.errors import ArtifactError
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.digests import KV_SCALES_NAME
from quantpipe.formats.kv_mode import KV_MODES
from quantpipe.formats.scheme import GROUP_SIZES, WeightScheme, w4a16, w8a8, weight_only
from quantpipe.models import describe

MakeFolder = Callable[..., Path]
MakeBatch = Callable[..., BatchInput]

# Float32 sums in another order: about 1e-6 of the largest logit, which is near 10 here.
FLOAT32_NOISE = 5e-5
# A value on a rounding boundary may go either way: one step, of absmax / 127 or a fifteenth of the range, in a few.
CHUNKING_NOISE = {
    "auto": FLOAT32_NOISE,
    "int8_per_token_head": 0.02,
    "int8_static": 0.02,
    "k_int8_v_int4": 0.3,
    "int4_per_token_head": 0.3,
}
ROUNDING_NOISE = {"int8_per_token_head": 0.02, "int8_static": 0.02, "k_int8_v_int4": 0.25, "int4_per_token_head": 0.3}
SCHEMES = {
    scheme.label: scheme
    for scheme in (
        *(w4a16(group_size) for group_size in GROUP_SIZES),
        weight_only(4, None),
        weight_only(4, 64, symmetric=False),
        weight_only(4, None, symmetric=False),
        weight_only(3, 32),
        weight_only(3, None, symmetric=False),
        weight_only(8, 128),
        weight_only(8, None),
        w8a8(),
    )
}
# Linears that run as one matrix may differ as well.
MIXED = {"k_proj": weight_only(8, None), "down_proj": weight_only(3, 64), "lm_head": weight_only(8, 32), "": w4a16(64)}
BLOCK_SIZE = 4


def load(backend: str, folder: Path) -> Executor:
    return BACKENDS[backend]().load(folder, activation_divisor=127.0, num_threads=None)


def random_ids(num_tokens: int, seed: int = 0) -> list[int]:
    ids: list[int] = torch.randint(0, 96, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def dense_logits(executor: Executor, make_batch: MakeBatch, ids: list[int], kv_dtype: str = "auto") -> Tensor:
    """All tokens in one step over blocks in order."""
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    kv = executor.allocate_kv_cache(num_blocks, BLOCK_SIZE, kv_dtype)
    return executor.forward(make_batch([(ids, 0, range(num_blocks))], BLOCK_SIZE), kv)


@pytest.mark.parametrize("kv_dtype", KV_MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_and_decodes_over_scrambled_blocks_equal_one_dense_step(
    backend: str, kv_dtype: str, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    executor = load(backend, make_folder())
    ids = random_ids(23)
    blocks = [9, 2, 11, 0, 7, 5]
    kv = executor.allocate_kv_cache(12, BLOCK_SIZE, kv_dtype)
    rows, start = [], 0
    for num_tokens in (5, 3, 7, 1, 1, 4, 1, 1):
        part = (ids[start : start + num_tokens], start, blocks)
        rows.append(executor.forward(make_batch([part], BLOCK_SIZE), kv))
        start += num_tokens
    assert start == len(ids)
    expected = dense_logits(executor, make_batch, ids, kv_dtype)
    torch.testing.assert_close(torch.cat(rows), expected, rtol=0, atol=CHUNKING_NOISE[kv_dtype])


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_step_equals_each_sequence_alone(backend: str, make_folder: MakeFolder, make_batch: MakeBatch) -> None:
    executor = load(backend, make_folder())
    # (length so far, new tokens): decodes of unlike lengths between fresh and continued prefill chunks
    shapes = [(9, 1), (0, 6), (30, 1), (70, 1), (8, 6), (3, 1), (0, 6), (11, 5)]
    free = torch.randperm(120, generator=torch.Generator().manual_seed(3)).tolist()
    kv = executor.allocate_kv_cache(120, BLOCK_SIZE, "auto")
    parts, expected = [], []
    for seed, (num_cached, num_new) in enumerate(shapes):
        ids = random_ids(num_cached + num_new, seed)
        blocks = [free.pop() for _ in range(-(-len(ids) // BLOCK_SIZE))]
        if num_cached:
            executor.forward(make_batch([(ids[:num_cached], 0, blocks)], BLOCK_SIZE), kv)
        parts.append((ids[num_cached:], num_cached, blocks))
        expected.append(dense_logits(executor, make_batch, ids)[num_cached:])
    found = executor.forward(make_batch(parts, BLOCK_SIZE), kv)
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=FLOAT32_NOISE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_wanted_rows_come_back(backend: str, make_folder: MakeFolder, make_batch: MakeBatch) -> None:
    executor = load(backend, make_folder())
    ids = random_ids(8)
    every_row = dense_logits(executor, make_batch, ids)
    for rows in ([], [7], [0, 3, 4]):
        kv = executor.allocate_kv_cache(2, BLOCK_SIZE, "auto")
        found = executor.forward(make_batch([(ids, 0, [1, 0])], BLOCK_SIZE, rows), kv)
        assert found.shape == (len(rows), 96)
        torch.testing.assert_close(found, every_row[rows], rtol=0, atol=FLOAT32_NOISE)


@pytest.mark.parametrize("kv_dtype", KV_MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sequence_that_overflowed_leaves_its_neighbours_unharmed(
    backend: str, kv_dtype: str, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    nan_token = 95
    executor = load(backend, make_folder(nan_token=nan_token))
    healthy, healthy_too = [5, 6, 7, 8, 9], [10, 11]
    kv = executor.allocate_kv_cache(4, BLOCK_SIZE, kv_dtype)
    # Block 0, which pads block tables, overflows beside a healthy sequence, then passes to one that half fills it.
    executor.forward(make_batch([(healthy[:4], 0, [2])], BLOCK_SIZE), kv)
    both = executor.forward(make_batch([([nan_token], 0, [0, 3]), (healthy[4:], 4, [2, 1])], BLOCK_SIZE), kv)
    assert both.isfinite().all(-1).tolist() == [False, True]
    executor.forward(make_batch([(healthy_too[:-1], 0, [0])], BLOCK_SIZE), kv)
    parts = [(healthy[-1:], 4, [2, 1]), (healthy_too[-1:], 1, [0])]
    found = executor.forward(make_batch(parts, BLOCK_SIZE), kv)
    expected = [dense_logits(executor, make_batch, ids, kv_dtype)[-1] for ids in (healthy, healthy_too)]
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=CHUNKING_NOISE[kv_dtype])


@pytest.mark.parametrize("kv_dtype", sorted(KV_MODES.keys() - {"auto"}))
@pytest.mark.parametrize("backend", BACKENDS)
def test_rounded_keys_and_values_stay_close_to_float_ones(
    backend: str, kv_dtype: str, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    executor = load(backend, make_folder())
    ids = random_ids(40)
    plain, rounded = (dense_logits(executor, make_batch, ids, name) for name in ("auto", kv_dtype))
    # Half a step at most for each stored value, absmax / 254 or a thirtieth of the range: some change, and a small one.
    relative = (rounded - plain).norm() / plain.norm()
    assert 1e-5 < relative < ROUNDING_NOISE[kv_dtype]


@pytest.mark.parametrize("kv_dtype", KV_MODES)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_every_cache_mode_gives_the_logits_of_the_reference(
    backend: str, kv_dtype: str, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    ids = random_ids(40)
    expected, found = (
        dense_logits(load(name, make_folder()), make_batch, ids, kv_dtype) for name in ("reference", backend)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=CHUNKING_NOISE[kv_dtype])


@pytest.mark.parametrize("backend", BACKENDS)
def test_static_mode_without_its_scales_is_refused(backend: str, make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(make_folder(), folder)
    (folder / KV_SCALES_NAME).unlink()
    executor = load(backend, folder)
    executor.allocate_kv_cache(1, BLOCK_SIZE, "auto")
    with pytest.raises(ArtifactError, match=r"kv_scales\.safetensors: no such file"):
        executor.allocate_kv_cache(1, BLOCK_SIZE, "int8_static")


@pytest.mark.parametrize("kv_dtype", KV_MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_cache_takes_the_bytes_that_are_announced(backend: str, kv_dtype: str, make_folder: MakeFolder) -> None:
    executor = load(backend, make_folder())
    kv: KVCache = executor.allocate_kv_cache(7, BLOCK_SIZE, kv_dtype)
    assert kv.num_bytes == 7 * executor.kv_bytes_per_block(BLOCK_SIZE, kv_dtype)
    assert (kv.num_blocks, kv.block_size, kv.dtype) == (7, BLOCK_SIZE, kv_dtype)


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 40])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_quantized_logits_equal_the_reference(
    backend: str, scheme: str, num_tokens: int, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    folder = make_folder(SCHEMES[scheme])
    ids = random_ids(num_tokens)
    expected = dense_logits(load("reference", folder), make_batch, ids)
    found = dense_logits(load(backend, folder), make_batch, ids)
    relative = (found - expected).norm() / expected.norm()
    # torch's w4a16 rounds activations to bfloat16 (2^-9 each, 15 roundings in a row here) and has no kernel for the
    # others; the compiled kernels round to 15 bits. In w8a8 an activation on a rounding boundary may go either way, one
    # part in 127 of one entry.
    bounds = {"w4a16": 0.02, "w8a8": 0.005} if backend == "torch" else {"w8a8": 0.005}
    assert relative < bounds.get(SCHEMES[scheme].name, 1e-5 if backend == "torch" else 3e-4)


@pytest.mark.parametrize(("activations", "bound"), [("int8", 0.05), ("int16", 3e-4), ("float32", 1e-5)])
@pytest.mark.parametrize("scheme", ["w4a16 g64", "w4a16 channel asymmetric", "w3a16 g32", "w8a16 g128"])
def test_activations_are_rounded_no_more_than_asked(
    scheme: str, activations: Activations, bound: float, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    folder = make_folder(SCHEMES[scheme])
    executor = BACKENDS["cpu"]().load(folder, 127.0, None, activations)
    if any(note.startswith("torch operators") for note in executor.notes):
        pytest.skip(executor.notes[0])
    ids = random_ids(24)
    expected = dense_logits(load("reference", folder), make_batch, ids)
    relative = (dense_logits(executor, make_batch, ids) - expected).norm() / expected.norm()
    # 8 bits, scaled per token and group of weights: one part in 127 of the largest, 15 times in a row.
    assert relative < bound
    assert any(note.startswith(SCHEMES[scheme].name) for note in executor.notes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_schemes_and_a_quantized_head_give_the_logits_of_the_decoded_weights(
    backend: str, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    quantized = make_folder(MIXED)
    described = describe(Artifact.open(quantized))
    assert described.layers[0].attention.key.scheme == MIXED["k_proj"]
    assert described.lm_head.scheme == MIXED["lm_head"]
    ids = random_ids(20)
    expected = dense_logits(load("reference", make_folder(MIXED, decoded=True)), make_batch, ids)
    executor = load(backend, quantized)
    found = dense_logits(executor, make_batch, ids)
    # 4-bit parts round activations: to bfloat16 on torch, to 15 bits in the compiled kernels.
    assert (found - expected).norm() / expected.norm() < (1e-5 if backend == "reference" else 0.02)
    if backend == "torch":
        assert {note.split(":")[0] for note in executor.notes} == {"w4a16", "w8a16", "w3a16", "lm_head"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantized_weights_take_less_room(backend: str, make_folder: MakeFolder) -> None:
    sizes = {name: load(backend, make_folder(scheme)).weight_bytes for name, scheme in quantizations().items()}
    plain = sum(weight.nbytes for weight in AutoModelForCausalLM.from_pretrained(make_folder()).parameters())
    # Compiled kernels pad what they pack, and the rows of a table of their own.
    assert plain <= sizes["none"] <= (1.05 if backend == "cpu" else 1) * plain
    assert sizes["w8a8"] < plain
    if backend != "reference":
        assert all(size < plain for name, size in sizes.items() if name != "none")


def quantizations() -> dict[str, WeightScheme | None]:
    return {"none": None, **SCHEMES}


@pytest.mark.parametrize("backend", BACKENDS)
def test_damaged_folder_is_refused(backend: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such folder"):
        load(backend, tmp_path / "absent")


def test_table_names_are_the_backends_own() -> None:
    assert all(factory().name == name for name, factory in BACKENDS.items())
