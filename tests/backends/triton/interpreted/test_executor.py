"""The whole forward through Triton's kernels gives what the reference gives, for every family and kind of step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantpipe.backends.most_likely import most_likely
from quantpipe.backends.protocol import BatchInput, Executor
from quantpipe.backends.reference import ReferenceBackend
from quantpipe.backends.triton import TritonBackend
from quantpipe.formats.kv_mode import KV_MODES
from quantpipe.formats.scheme import w4a16, w8a8, weight_only

MakeFolder = Callable[..., Path]
MakeBatch = Callable[..., BatchInput]

BLOCK_SIZE = 4
# Float32 sums in another order: about 1e-6 of the largest logit, which is near 10 here.
FLOAT32_NOISE = 5e-5
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 7},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 48, "attention_bias": True},
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
SCHEMES = {
    "w4a16": w4a16(32),
    "w8a8": w8a8(),
    "mixed": {"k_proj": weight_only(8, None), "down_proj": w8a8(), "lm_head": weight_only(8, 32), "": w4a16(64)},
}


def load_both(folder: Path) -> tuple[Executor, Executor]:
    return ReferenceBackend().load(folder, 127.0, None), TritonBackend().load(folder, 127.0, None)


def random_ids(num_tokens: int, seed: int = 0) -> list[int]:
    ids: list[int] = torch.randint(0, 96, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def logits(executor: Executor, make_batch: MakeBatch, kv_dtype: str = "auto") -> list[Tensor]:
    """Of a chunk, and of a step in which that sequence decodes beside another's chunk."""
    kv = executor.allocate_kv_cache(9, BLOCK_SIZE, kv_dtype)
    ids, others = random_ids(15), random_ids(5, seed=1)
    first = make_batch([(ids[:14], 0, [7, 1, 4, 0])], BLOCK_SIZE)
    second = make_batch([(others, 0, [2, 5]), (ids[14:], 14, [7, 1, 4, 0])], BLOCK_SIZE, rows=[2, 4, 5])
    return [executor.forward(batch, kv) for batch in (first, second)]


@pytest.mark.parametrize("decoder", DECODERS)
def test_logits_equal_the_references(decoder: str, make_folder: MakeFolder, make_batch: MakeBatch) -> None:
    expected, found = (logits(executor, make_batch) for executor in load_both(make_folder(**DECODERS[decoder])))
    assert found[1].shape == (3, 96)
    torch.testing.assert_close(found, expected, rtol=0, atol=FLOAT32_NOISE)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_logits_equal_the_references(scheme: str, make_folder: MakeFolder, make_batch: MakeBatch) -> None:
    executors = load_both(make_folder(SCHEMES[scheme]))
    expected, found = (torch.cat(logits(executor, make_batch)) for executor in executors)
    # In w8a8 an activation on a rounding boundary may go either way, one part in 127 of one entry.
    assert (found - expected).norm() / expected.norm() < (1e-5 if scheme == "w4a16" else 0.005)


@pytest.mark.parametrize("kv_dtype", sorted(KV_MODES.keys() - {"auto"}))
def test_every_cache_mode_gives_the_logits_of_the_reference(
    kv_dtype: str, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    executors = load_both(make_folder())
    plain, expected, found = (
        torch.cat(logits(executor, make_batch, mode))
        for executor, mode in ((executors[0], "auto"), (executors[0], kv_dtype), (executors[1], kv_dtype))
    )
    # A value on a rounding boundary may go either way; most do not, so far less differs than rounding changes.
    assert (found - expected).norm() < 0.1 * (plain - expected).norm()


def test_windows_sinks_and_dropped_blocks_are_those_of_the_reference(
    make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    ids, num_sinks, window = random_ids(30), 5, 8
    found = []
    for executor in load_both(make_folder()):
        kv, rows = executor.allocate_kv_cache(12, BLOCK_SIZE, "auto"), []
        # Sinks take blocks 0 and 1; behind 26 tokens those of positions 8 to 15 are out of sight.
        for start, end, blocks, dropped in (
            (0, 26, range(7), 0),
            (26, 27, [0, 1, 4, 5, 6], 2),
            (27, 30, [0, 1, 4, 5, 6, 9], 2),
        ):
            part = (ids[start:end], start, blocks)
            batch = make_batch([part], BLOCK_SIZE, num_sinks=num_sinks, window=window, dropped=[dropped])
            rows.append(executor.forward(batch, kv))
        found.append(torch.cat(rows))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=FLOAT32_NOISE)


def test_greedy_tokens_are_those_of_the_logits(make_folder: MakeFolder, make_batch: MakeBatch) -> None:
    nan_token = 95
    executor = TritonBackend().load(make_folder(nan_token=nan_token), 127.0, None)
    kv = executor.allocate_kv_cache(4, BLOCK_SIZE, "auto")
    batch = make_batch([(random_ids(5), 0, [3, 1]), ([nan_token], 0, [0])], BLOCK_SIZE)
    token_ids, rows = executor.forward_greedy(batch, kv), executor.forward(batch, kv)
    assert torch.equal(token_ids, most_likely(rows))
    assert token_ids[-1] == -1
    assert (token_ids[:-1] >= 0).all()
    nothing = make_batch([(random_ids(5), 0, [3, 1])], BLOCK_SIZE, rows=[])
    assert executor.forward_greedy(nothing, kv).shape == (0,)
    assert executor.forward(nothing, kv).shape == (0, 96)


@pytest.mark.parametrize("kv_dtype", KV_MODES)
def test_cache_takes_the_bytes_that_are_announced(kv_dtype: str, make_folder: MakeFolder) -> None:
    executor = TritonBackend().load(make_folder(), 127.0, None)
    kv = executor.allocate_kv_cache(7, BLOCK_SIZE, kv_dtype)
    assert kv.num_bytes == 7 * executor.kv_bytes_per_block(BLOCK_SIZE, kv_dtype)
    assert (kv.num_blocks, kv.block_size, kv.dtype) == (7, BLOCK_SIZE, kv_dtype)


def test_folders_dtype_is_the_caches_but_for_bfloat16_which_the_interpreter_lacks(
    random_llama: Callable[..., Path],
) -> None:
    for stored, computed in ((torch.float16, torch.float16), (torch.bfloat16, torch.float32)):
        executor = TritonBackend().load(random_llama(stored), 127.0, None)
        kv = executor.allocate_kv_cache(1, BLOCK_SIZE, "auto")
        assert executor.dtype == kv.keys.codes.dtype == computed
        assert any("interpreted" in note for note in executor.notes)
