"""Windows, sinks and dropped blocks: every backend attends as one that keeps its keys unturned and turns them anew.

Shapes: t tokens of a sequence, C keys in its cache, H query heads, J KV heads, D head_dim.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantpipe.backends import BACKENDS
from quantpipe.backends.activations import ACTIVATIONS
from quantpipe.backends.protocol import BatchInput, Executor, KVCache
from quantpipe.backends.reference import ReferenceBackend, ReferenceExecutor, rotate
from quantpipe.formats.kv_mode import KV_MODES

MakeFolder = Callable[..., Path]
MakeBatch = Callable[..., BatchInput]

BLOCK_SIZE = 4
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
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "yarn rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "mistral with a narrower window": {"model_type": "mistral", "sliding_window": 7},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 48,
        "query_pre_attn_scalar": 40,
        "sliding_window": 9,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    "phi3 turned in part": {"model_type": "phi3", "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}},
}
# (sinks, window): across blocks, aligned, none, more sinks than window.
FORMS = [(5, 9), (4, 12), (0, 10), (6, 3)]


def load(backend: str, folder: Path) -> Executor:
    executor = BACKENDS[backend]().load(folder, activation_divisor=127.0, num_threads=None)
    if not executor.supports_windows:
        pytest.skip(f"backend {backend} says that it knows no windows of a batch's own")
    return executor


def random_ids(num_tokens: int, seed: int = 0) -> list[int]:
    ids: list[int] = torch.randint(0, 96, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


@dataclass
class UnrotatedCache:
    """Of one layer: keys as they are before rope, and values; first the sinks, then the latest of the others."""

    num_sinks: int
    window: int
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def add(self, key_JD: Tensor, value_JD: Tensor) -> None:
        for kept, new in ((self.keys, key_JD), (self.values, value_JD)):
            kept.append(new)
            if len(kept) > self.num_sinks + self.window:
                del kept[self.num_sinks]


def streaming_logits(model: ReferenceExecutor, token_ids: list[int], num_sinks: int, window: int) -> Tensor:
    """Token by token, as Xiao et al. 2023 do it: all keys of the cache are turned anew by their place in it."""
    caches = [
        UnrotatedCache(num_sinks, min(window, layer.attention.window or window)) for layer in model.description.layers
    ]
    return torch.cat([streaming_step(model, token_id, caches) for token_id in token_ids])


def streaming_step(model: ReferenceExecutor, token_id: int, caches: list[UnrotatedCache]) -> Tensor:
    x_tH = model.embedding_VH[[token_id]] * model.description.embedding_scale
    for layer, cache in zip(model.description.layers, caches, strict=True):
        spec = layer.attention
        normed_tH = model._norm(layer.attention_norm, x_tH)
        query, key, value = (
            model.linear(linear, normed_tH).view(-1, spec.head_dim) for linear in (spec.query, spec.key, spec.value)
        )
        cache.add(model._norm(spec.key_norm, key), value)
        places_C = torch.arange(len(cache.keys))
        keys_CJD = rotate(torch.stack(cache.keys), spec.rope, places_C)
        [query_HD] = rotate(model._norm(spec.query_norm, query)[None], spec.rope, places_C[-1:])
        out = []
        for head, query_D in enumerate(query_HD):
            j = head // (spec.num_heads // spec.num_kv_heads)
            weights_C = (keys_CJD[:, j] @ query_D * spec.softmax_scale).softmax(0)
            out.append(weights_C @ torch.stack(cache.values)[:, j])
        x_tH = x_tH + model._norm(layer.post_attention_norm, model.linear(spec.output, torch.cat(out)[None]))
        normed_tH = model._norm(layer.mlp_norm, x_tH)
        gate, up = model.linear(layer.mlp.gate, normed_tH), model.linear(layer.mlp.up, normed_tH)
        down = model.linear(layer.mlp.down, ACTIVATIONS[layer.mlp.activation](gate) * up)
        x_tH = x_tH + model._norm(layer.post_mlp_norm, down)
    return model.linear(model.description.lm_head, model._norm(model.description.final_norm, x_tH))


@dataclass
class Stream:
    """A sequence whose blocks are dropped as soon as no later query can see them."""

    num_sinks: int
    window: int
    blocks: list[int]
    free: list[int]
    num_read: int = 0
    num_dropped: int = 0

    @property
    def num_sink_blocks(self) -> int:
        return -(-self.num_sinks // BLOCK_SIZE)

    def part(self, token_ids: list[int]) -> tuple[list[int], int, list[int]]:
        while (len(self.blocks) + self.num_dropped) * BLOCK_SIZE < self.num_read + len(token_ids):
            self.blocks.append(self.free.pop(0))
        return token_ids, self.num_read, list(self.blocks)

    def advance(self, num_tokens: int) -> None:
        self.num_read += num_tokens
        num_unseen = (self.num_read - self.window + 1) // BLOCK_SIZE - self.num_sink_blocks
        while self.num_dropped < num_unseen:
            self.free.append(self.blocks.pop(self.num_sink_blocks))
            self.num_dropped += 1


def streamed(
    executor: Executor,
    make_batch: MakeBatch,
    kv: KVCache,
    stream: Stream,
    token_ids: list[int],
    sizes: tuple[int, ...],
) -> Tensor:
    rows: list[Tensor] = []
    for size in itertools.cycle(sizes):
        new = token_ids[stream.num_read : stream.num_read + size]
        if not new:
            return torch.cat(rows)
        form = {"num_sinks": stream.num_sinks, "window": stream.window, "dropped": [stream.num_dropped]}
        rows.append(executor.forward(make_batch([stream.part(new)], BLOCK_SIZE, **form), kv))
        stream.advance(len(new))
    raise AssertionError("a cycle has no end")


@pytest.fixture(scope="module")
def dense_logits(make_folder: MakeFolder) -> Callable[[str, list[int], int, int], Tensor]:
    """``streaming_logits`` of a decoder, computed once for all backends."""
    known: dict[tuple[str, int, int], Tensor] = {}

    def logits(decoder: str, token_ids: list[int], num_sinks: int, window: int) -> Tensor:
        key = (decoder, num_sinks, window)
        if key not in known:
            model = ReferenceBackend().load(make_folder(**DECODERS[decoder]), 127.0, None)
            known[key] = streaming_logits(model, token_ids, num_sinks, window)
        return known[key]

    return logits


@pytest.mark.parametrize("sizes", [(1,), (23, 1, 1, 5, 1)])
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_equal_those_of_keys_turned_anew_by_their_place_in_the_cache(
    backend: str,
    decoder: str,
    sizes: tuple[int, ...],
    make_folder: MakeFolder,
    make_batch: MakeBatch,
    dense_logits: Callable[[str, list[int], int, int], Tensor],
) -> None:
    executor, ids = load(backend, make_folder(**DECODERS[decoder])), random_ids(44)
    for num_sinks, window in FORMS if decoder == "llama" else FORMS[:1]:
        stream = Stream(num_sinks, window, [], [9, 3, 7, 11, 1, 8, 0, 5, 2, 10, 6, 4])
        kv = executor.allocate_kv_cache(12, BLOCK_SIZE, "auto")
        found = streamed(executor, make_batch, kv, stream, ids, sizes)
        assert stream.num_dropped > 3
        expected = dense_logits(decoder, ids, num_sinks, window)
        torch.testing.assert_close(found, expected, rtol=0, atol=FLOAT32_NOISE)


@pytest.mark.parametrize("kv_dtype", KV_MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_dropping_blocks_changes_nothing_under_any_kv_mode(
    backend: str, kv_dtype: str, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    executor, ids = load(backend, make_folder()), random_ids(50)
    kv = executor.allocate_kv_cache(8, BLOCK_SIZE, kv_dtype)
    found = streamed(executor, make_batch, kv, Stream(3, 10, [], list(range(8))), ids, (7, 1, 1, 12))
    keeping = executor.allocate_kv_cache(13, BLOCK_SIZE, kv_dtype)
    all_at_once = make_batch([(ids, 0, range(13)[::-1])], BLOCK_SIZE, num_sinks=3, window=10)
    torch.testing.assert_close(found, executor.forward(all_at_once, keeping), rtol=0, atol=CHUNKING_NOISE[kv_dtype])


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_step_and_forks_equal_each_sequence_alone(
    backend: str, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    executor = load(backend, make_folder())
    # (length so far, new tokens): before, at and far behind the end of sinks + window, decodes and chunks
    shapes = [(3, 1), (30, 1), (0, 20), (13, 1), (6, 3), (45, 3), (60, 1), (0, 5)]
    num_sinks, window, free = 5, 8, list(range(64))
    kv = executor.allocate_kv_cache(64, BLOCK_SIZE, "auto")
    parts, dropped, expected = [], [], []
    for seed, (num_cached, num_new) in enumerate(shapes):
        ids, stream = random_ids(num_cached + num_new, seed), Stream(num_sinks, window, [], free)
        if num_cached:
            streamed(executor, make_batch, kv, stream, ids[:num_cached], (9, 1))
        parts.append(stream.part(ids[num_cached:]))
        dropped.append(stream.num_dropped)
        whole = make_batch([(ids, 0, range(20))], BLOCK_SIZE, num_sinks=num_sinks, window=window)
        expected.append(executor.forward(whole, executor.allocate_kv_cache(20, BLOCK_SIZE, "auto"))[num_cached:])
    # The sequence of 45 tokens forks: all but its last block is shared.
    token_ids, num_cached, blocks = parts[5]
    kv.copy_blocks([(blocks[-1], free[-1]), (blocks[-2], free[-2])])
    parts.append((token_ids, num_cached, [*blocks[:-2], free[-2], free[-1]]))
    dropped.append(dropped[5])
    expected.append(expected[5])
    batch = make_batch(parts, BLOCK_SIZE, num_sinks=num_sinks, window=window, dropped=dropped)
    torch.testing.assert_close(executor.forward(batch, kv), torch.cat(expected), rtol=0, atol=FLOAT32_NOISE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_dropped_behind_a_models_own_windows_are_not_missed(
    backend: str, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    executor, ids = load(backend, make_folder(**DECODERS["mistral with a narrower window"])), random_ids(50)
    num_dropped = (49 - 7 + 1) // BLOCK_SIZE
    kv = executor.allocate_kv_cache(13, BLOCK_SIZE, "auto")
    executor.forward(make_batch([(ids[:49], 0, range(13))], BLOCK_SIZE), kv)
    last = make_batch([(ids[49:], 49, range(num_dropped, 13))], BLOCK_SIZE, dropped=[num_dropped])
    found = executor.forward(last, kv)
    whole = executor.forward(make_batch([(ids, 0, range(13))], BLOCK_SIZE), kv)
    torch.testing.assert_close(found, whole[-1:], rtol=0, atol=FLOAT32_NOISE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_far_positions_keep_their_distances(backend: str, make_folder: MakeFolder, make_batch: MakeBatch) -> None:
    """Float32 angles would be wrong by half a radian here."""
    executor, ids = load(backend, make_folder()), random_ids(30)
    rows = []
    for start in (0, BLOCK_SIZE * 2_500_000):
        kv = executor.allocate_kv_cache(8, BLOCK_SIZE, "auto")
        rows.append(
            executor.forward(
                make_batch([(ids, start, range(8))], BLOCK_SIZE, window=10, dropped=[start // BLOCK_SIZE]), kv
            )
        )
    torch.testing.assert_close(rows[1], rows[0], rtol=0, atol=FLOAT32_NOISE)
