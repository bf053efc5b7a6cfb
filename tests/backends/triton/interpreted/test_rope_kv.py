"""Queries are normed and turned as the reference does it, and the cache holds the codes of ``formats.kv_mode``."""

import pytest
import torch
from torch import Tensor

from quantpipe.backends.reference import rotate
from quantpipe.backends.triton.kv_cache import LayerStore, TritonKVCache
from quantpipe.backends.triton.ops.rope_kv import HeadNorm, Turns, rope_and_write
from quantpipe.formats.kv_mode import KV_MODES
from quantpipe.formats.kv_rounding import encode_kv
from quantpipe.formats.kv_scales import KVScales
from quantpipe.models.description import RopeSpec

NUM_HEADS, NUM_KV_HEADS, NUM_BLOCKS, BLOCK_SIZE = 6, 2, 5, 4
SLOTS = (18, 7, 0, 13, 2)
POSITIONS = (3, 0, 10_000_003, 77, 1)
SCALES = KVScales((torch.tensor([0.01, 0.03]),), (torch.tensor([0.02, 0.005]),))
# (head_dim, pairs that turn)
SHAPES = [(32, 16), (48, 24), (80, 16), (16, 3)]


def rope_of(num_pairs: int) -> RopeSpec:
    return RopeSpec(tuple(10000.0 ** (-pair / num_pairs) for pair in range(num_pairs)), attention_scale=1.25)


def turns_of(rope: RopeSpec, positions: tuple[int, ...]) -> Turns:
    frequencies_P = torch.tensor(rope.inverse_frequencies, dtype=torch.float64)
    return Turns.of(frequencies_P, rope.attention_scale, torch.tensor(positions))


def random_heads(head_dim: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Queries, keys and values [T, H + 2J, D] of which one is all zero, and others differ by orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    heads = torch.randn(len(SLOTS), NUM_HEADS + 2 * NUM_KV_HEADS, head_dim, generator=generator)
    heads *= 10 ** torch.randint(-2, 2, (*heads.shape[:2], 1), generator=generator).float()
    heads[1, NUM_HEADS] = 0
    heads[2, -1] = 0
    return heads.to(dtype)


def cache(head_dim: int, dtype: torch.dtype, kv_dtype: str = "auto") -> TritonKVCache:
    sizes = (1, NUM_KV_HEADS, head_dim)
    return TritonKVCache.allocate(NUM_BLOCKS, BLOCK_SIZE, kv_dtype, sizes, dtype, torch.device("cpu"), SCALES)


def stored(store: LayerStore, slots: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """Codes [T, J, W] and parameters [T, J, P] of some slots."""
    blocks, offsets = torch.tensor(slots) // BLOCK_SIZE, torch.tensor(slots) % BLOCK_SIZE
    parameters = None if store.parameters is None else store.parameters[blocks, :, :, offsets]
    return store.codes[blocks, :, offsets], parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("head_dim", "num_pairs"), SHAPES)
def test_queries_keys_and_values_equal_the_references(head_dim: int, num_pairs: int, dtype: torch.dtype) -> None:
    heads, rope, kv = random_heads(head_dim, dtype), rope_of(num_pairs), cache(head_dim, dtype)
    found_THD, no_sinks = rope_and_write(
        heads.flatten(1),
        turns_of(rope, POSITIONS),
        None,
        None,
        None,
        torch.tensor(SLOTS),
        kv.keys.layer(0),
        kv.values.layer(0),
        head_dim,
    )
    assert no_sinks is None
    query_THD, key_TJD, value_TJD = heads.float().split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)
    positions_T = torch.tensor(POSITIONS)
    assert torch.equal(found_THD, rotate(query_THD, rope, positions_T).to(dtype))
    assert torch.equal(stored(kv.keys.layer(0), SLOTS)[0], rotate(key_TJD, rope, positions_T).to(dtype))
    assert torch.equal(stored(kv.values.layer(0), SLOTS)[0], value_TJD.to(dtype))
    assert int((kv.keys.codes != 0).any(-1).sum()) == len(SLOTS) * NUM_KV_HEADS - 1  # nothing else was written


@pytest.mark.parametrize("kv_dtype", sorted(KV_MODES.keys() - {"auto"}))
@pytest.mark.parametrize(("head_dim", "num_pairs"), [(32, 16), (48, 8)])
def test_cache_holds_the_codes_of_the_rules_bit_for_bit(head_dim: int, num_pairs: int, kv_dtype: str) -> None:
    heads, rope, mode = random_heads(head_dim, torch.float32), rope_of(num_pairs), KV_MODES[kv_dtype]
    kv = cache(head_dim, torch.float32, kv_dtype)
    rope_and_write(
        heads.flatten(1),
        turns_of(rope, POSITIONS),
        None,
        None,
        None,
        torch.tensor(SLOTS),
        kv.keys.layer(0),
        kv.values.layer(0),
        head_dim,
    )
    key_TJD, value_TJD = heads[:, NUM_HEADS:].chunk(2, dim=1)
    turned_TJD = rotate(key_TJD, rope, torch.tensor(POSITIONS))
    for store, new_TJD, rule, scale_J in (
        (kv.keys, turned_TJD, mode.key, SCALES.key[0]),
        (kv.values, value_TJD, mode.value, SCALES.value[0]),
    ):
        codes, parameters = encode_kv(new_TJD, rule, scale_J.unsqueeze(-1))
        found_codes, found_parameters = stored(store.layer(0), SLOTS)
        assert torch.equal(found_codes, codes)
        if parameters is None:
            assert found_parameters is None
        else:
            assert torch.equal(found_parameters, parameters)


@pytest.mark.parametrize("kv_dtype", KV_MODES)
def test_what_is_not_finite_is_not_stored_as_a_number(kv_dtype: str) -> None:
    head_dim = 32
    heads, kv = random_heads(head_dim, torch.float32), cache(head_dim, torch.float32, kv_dtype)
    heads[0, -1, 5], heads[3, -2, 20], heads[4, NUM_HEADS, 0] = torch.nan, torch.inf, torch.nan
    rope_and_write(
        heads.flatten(1),
        turns_of(rope_of(16), POSITIONS),
        None,
        None,
        None,
        torch.tensor(SLOTS),
        kv.keys.layer(0),
        kv.values.layer(0),
        head_dim,
    )
    mode = KV_MODES[kv_dtype]
    for store, rule, broken in ((kv.keys, mode.key, {(4, 0)}), (kv.values, mode.value, {(0, 1), (3, 0)})):
        codes, parameters = stored(store.layer(0), SLOTS)
        if rule.is_static:
            is_broken_TJ = (codes == -128).any(-1)
        else:
            is_broken_TJ = ~(codes if parameters is None else parameters).isfinite().all(-1)
        assert {tuple(place) for place in is_broken_TJ.nonzero().tolist()} == broken


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("head_dim", "num_pairs"), [(32, 16), (48, 8)])
def test_heads_are_normed_before_they_are_turned(head_dim: int, num_pairs: int, dtype: torch.dtype) -> None:
    heads, rope, kv = random_heads(head_dim, dtype), rope_of(num_pairs), cache(head_dim, dtype)
    norms = [HeadNorm(torch.linspace(0.5, last, head_dim), eps) for last, eps in ((1.5, 1e-5), (-1.0, 1e-3))]
    found_THD, _ = rope_and_write(
        heads.flatten(1),
        turns_of(rope, POSITIONS),
        None,
        *norms,
        torch.tensor(SLOTS),
        kv.keys.layer(0),
        kv.values.layer(0),
        head_dim,
    )
    for found, first, num, norm in (
        (found_THD, 0, NUM_HEADS, norms[0]),
        (stored(kv.keys.layer(0), SLOTS)[0], NUM_HEADS, NUM_KV_HEADS, norms[1]),
    ):
        x = heads[:, first : first + num].double()
        normed = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight_D
        expected = rotate(normed, rope, torch.tensor(POSITIONS))
        bound = 1e-5 if dtype == torch.float32 else 2e-3  # of the largest: half a step of 11 bits
        assert (found.double() - expected).abs().max() < bound * expected.abs().max()


def test_queries_for_sinks_are_turned_by_positions_of_their_own() -> None:
    head_dim, sink_positions = 32, (3, 0, 12, 12, 1)
    heads, rope, kv = random_heads(head_dim, torch.float32), rope_of(16), cache(head_dim, torch.float32)
    _, found_THD = rope_and_write(
        heads.flatten(1),
        turns_of(rope, POSITIONS),
        turns_of(rope, sink_positions),
        None,
        None,
        torch.tensor(SLOTS),
        kv.keys.layer(0),
        kv.values.layer(0),
        head_dim,
    )
    assert found_THD is not None
    assert torch.equal(found_THD, rotate(heads[:, :NUM_HEADS], rope, torch.tensor(sink_positions)))


def test_token_without_a_slot_is_not_written() -> None:
    head_dim, slots = 32, torch.tensor([18, -1, 0, -1, 2])
    heads, rope, kv = random_heads(head_dim, torch.float32), rope_of(16), cache(head_dim, torch.float32)
    rope_and_write(
        heads.flatten(1),
        turns_of(rope, POSITIONS),
        None,
        None,
        None,
        slots,
        kv.keys.layer(0),
        kv.values.layer(0),
        head_dim,
    )
    written = {int(b) * BLOCK_SIZE + int(o) for b, _, o in (kv.values.layer(0).codes != 0).any(-1).nonzero().tolist()}
    assert written == {18, 0, 2}
