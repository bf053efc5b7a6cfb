"""In every KV mode, whatever the schedule, a request gets what a dense model gives that rounds keys and values alike.

Once with a made-up model, exactly: its logits are made of every bit of the keys and values that it reads back. Once
with the backends and transformers as the dense model, within what sums in another order change.

Shapes: T tokens of a step, C context tokens of one sequence, J KV heads, D head_dim, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from quantpipe.backends import BACKENDS
from quantpipe.backends.most_likely import most_likely
from quantpipe.backends.protocol import BatchInput, DecodeLimits
from quantpipe.backends.reference_kv_cache import ReferenceKVCache
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import RequestOutput, SamplingParams
from quantpipe.formats.kv_mode import KV_MODES
from quantpipe.formats.kv_rounding import round_kv
from quantpipe.formats.kv_scales import KVScales, read_kv_scales
from tests.engine.schedules import STOP, Plan, Run, configs, plans

NUM_KV_HEADS, HEAD_DIM, MAX_LEN = 2, 8, 64
GENERATOR = torch.Generator().manual_seed(3)
# Static scales that do not cover the larger keys and values: those are clamped.
SCALES = KVScales(*((torch.tensor([0.02, 0.03]),) for _ in range(2)))


class MadeUpModel:
    """Keys and values follow from token and position, logits from all bits of those before and at a position."""

    supports_windows = True

    def __init__(self, kv_dtype: str, fake_model: SimpleNamespace) -> None:
        self.kv_dtype = kv_dtype
        self._visible_positions = fake_model.visible_positions
        self.vocab_size = fake_model.vocab_size
        self.description = SimpleNamespace(
            vocab_size=self.vocab_size, max_position_embeddings=MAX_LEN, eos_token_ids=(STOP,), windows=(None,)
        )
        self.device = torch.device("cpu")
        self.weight_bytes = 0
        self.context_tokens = (0, 0)
        self.notes: tuple[str, ...] = ()

    def kv_bytes_per_block(self, block_size: int, dtype: str) -> int:
        return block_size * KV_MODES[dtype].token_bytes(NUM_KV_HEADS, HEAD_DIM)

    def allocate_kv_cache(self, num_blocks: int, block_size: int, dtype: str) -> ReferenceKVCache:
        scales = SCALES if KV_MODES[dtype].needs_scales else None
        return ReferenceKVCache.allocate(num_blocks, block_size, dtype, 1, NUM_KV_HEADS, HEAD_DIM, scales)

    def record_decodes(self, kv_cache: ReferenceKVCache, limits: DecodeLimits) -> None:
        pass

    def forward(self, batch: BatchInput, kv_cache: ReferenceKVCache) -> Tensor:
        key_TJD, value_TJD = keys_and_values(batch.token_ids_T, batch.positions_T)
        [keys], [values] = kv_cache.keys, kv_cache.values
        keys.write(key_TJD, batch.slot_mapping_T)
        values.write(value_TJD, batch.slot_mapping_T)
        logits, token, wanted = [], 0, set(batch.logit_rows_R.tolist())
        held_lens, num_first = batch.held_lens(kv_cache.block_size), first_tokens(batch.num_sinks, kv_cache.block_size)
        for row, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
            read = [store.read(batch.block_table_SB[row], held_lens[row]) for store in (keys, values)]
            positions = np.arange(held_lens[row])
            positions[num_first:] += context_len - held_lens[row]
            for length in range(context_len - query_len + 1, context_len + 1):
                if token in wanted:
                    seen = self._visible_positions(length, (batch.num_sinks, batch.window))
                    is_seen = np.isin(positions, seen)
                    logits.append(logits_after(*(part_CJD[is_seen] for part_CJD in read), seen, self.vocab_size))
                token += 1
        return torch.from_numpy(np.stack(logits)) if logits else torch.empty(0, self.vocab_size)

    def forward_greedy(self, batch: BatchInput, kv_cache: ReferenceKVCache) -> Tensor:
        return most_likely(self.forward(batch, kv_cache))

    def dense_logits(self, token_ids: Sequence[int], form: tuple[int, int | None]) -> Tensor:
        """No cache, blocks or batch."""
        mode = KV_MODES[self.kv_dtype]
        made = keys_and_values(torch.tensor(token_ids), torch.arange(len(token_ids)))
        seen = self._visible_positions(len(token_ids), form)
        rounded = [
            round_kv(part_CJD, rule, scale_J[:, None] if rule.is_static else None)[seen]
            for part_CJD, rule, [scale_J] in zip(made, (mode.key, mode.value), (SCALES.key, SCALES.value), strict=True)
        ]
        return torch.from_numpy(logits_after(*rounded, seen, self.vocab_size))


def first_tokens(num_sinks: int, block_size: int) -> int:
    """Those of the sink blocks, which stay."""
    return -(-num_sinks // block_size) * block_size


TOKEN_PARTS = torch.randn(2, 64, NUM_KV_HEADS, HEAD_DIM, generator=GENERATOR)
POSITION_PARTS = torch.randn(2, MAX_LEN, NUM_KV_HEADS, HEAD_DIM, generator=GENERATOR)
FACTORS = np.random.default_rng(0).integers(1, 1 << 40, (MAX_LEN, 2 * NUM_KV_HEADS * HEAD_DIM)) | 1


def keys_and_values(token_ids_T: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    key_TJD, value_TJD = TOKEN_PARTS[:, token_ids_T] + POSITION_PARTS[:, positions_T]
    return key_TJD, value_TJD


def logits_after(
    key_CJD: Tensor, value_CJD: Tensor, positions_C: npt.NDArray[np.int64], vocab_size: int
) -> npt.NDArray[np.float32]:
    """Integers, so that no order of sums matters."""
    bits = torch.cat((key_CJD.flatten(1), value_CJD.flatten(1)), dim=1).contiguous().numpy().view(np.int32)
    mixed = int((bits * FACTORS[positions_C]).sum()) % 1_000_003
    tokens = (np.arange(vocab_size) + 1) * 40503
    return (tokens * (mixed * 2 + 1) % 65537 / 9000).astype(np.float32)


@settings(max_examples=6, deadline=None)
@given(schedule=plans, config=configs)
@pytest.mark.parametrize("kv_dtype", KV_MODES)
def test_tokens_equal_those_of_a_dense_model_that_rounds_alike(
    fake_model: SimpleNamespace, kv_dtype: str, schedule: list[Plan], config: EngineConfig
) -> None:
    model = MadeUpModel(kv_dtype, fake_model)
    run = Run(Engine(model, config, kv_dtype), schedule)
    run.to_the_end()
    run.check(partial(model.dense_logits, form=(config.sink_tokens, config.window_tokens)))


class RoundingCache(DynamicCache):
    """Gives back what a cache of this mode would, for a text that is read in one go."""

    def __init__(self, kv_dtype: str, scales: KVScales) -> None:
        super().__init__()
        self.mode, self.scales = KV_MODES[kv_dtype], scales

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        rounded = []
        for states, rule, scales in (
            (key_states, self.mode.key, self.scales.key),
            (value_states, self.mode.value, self.scales.value),
        ):
            scale_J1 = scales[layer_idx][:, None] if rule.is_static else None
            rounded.append(round_kv(states.transpose(1, 2), rule, scale_J1).transpose(1, 2))
        return tuple(rounded)


@pytest.fixture(scope="module")
def folder(random_llama: Callable[..., Path], add_kv_scales: Callable[[Path], Path]) -> Path:
    return add_kv_scales(random_llama(tie_word_embeddings=False))


@pytest.fixture(scope="module")
def dense_logprobs(folder: Path) -> Callable[[Sequence[int], str], Tensor]:
    """Log-probabilities [C, V] of transformers after each token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    scales = read_kv_scales(folder, 2, 2)

    def read(token_ids: Sequence[int], kv_dtype: str) -> Tensor:
        with torch.no_grad():
            cache = RoundingCache(kv_dtype, scales)
            logits: Tensor = model(torch.tensor([list(token_ids)]), cache=cache, use_cache=True).logits
        return logits[0].double().log_softmax(-1)

    return read


@dataclasses.dataclass(frozen=True)
class Asked:
    head: int
    tail: tuple[int, ...]
    n: int
    is_scored: bool

    @property
    def prompt_ids(self) -> list[int]:
        return [*range(20, 20 + self.head), *self.tail]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            n=self.n,
            max_tokens=9,
            temperature=0.7 if self.n > 1 else 0.0,
            seed=5,
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=0 if self.is_scored else None,
        )


asked = st.lists(
    st.builds(
        Asked,
        head=st.sampled_from([0, 7, 8, 13]),
        tail=st.lists(st.integers(3, 127), min_size=1, max_size=6).map(tuple),
        n=st.sampled_from([1, 1, 3]),
        is_scored=st.booleans(),
    ),
    min_size=3,
    max_size=6,
)
# Float32 sums in another order, and where keys and values are quantized, one that then rounds the other way.
TOLERANCE = {kv_dtype: 1e-4 if kv_dtype == "auto" else 2e-2 for kv_dtype in KV_MODES}


@settings(max_examples=2, deadline=None)
@given(requests=asked, block_size=st.integers(2, 6), max_chunk=st.integers(2, 12), prefix_cache=st.booleans())
@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("kv_dtype", KV_MODES)
def test_log_probabilities_equal_those_of_transformers_that_rounds_alike(
    folder: Path,
    dense_logprobs: Callable[[Sequence[int], str], Tensor],
    backend: str,
    kv_dtype: str,
    requests: list[Asked],
    block_size: int,
    max_chunk: int,
    prefix_cache: bool,
) -> None:
    config = EngineConfig(
        backend=backend, kv_dtype=kv_dtype, block_size=block_size, max_model_len=32, num_kv_blocks=-(-36 // block_size),
        max_num_seqs=4, max_num_batched_tokens=12, max_prefill_chunk=max_chunk, prefix_cache=prefix_cache,
        admission="greedy", num_threads=1,
    )  # fmt: skip
    engine = Engine.open(folder, config)
    request_ids = [engine.add(request.prompt_ids, request.params) for request in requests]
    while engine.has_unfinished:
        engine.step()
    for request, request_id in zip(requests, request_ids, strict=True):
        check(engine.take_output(request_id), request, lambda ids: dense_logprobs(ids, kv_dtype), TOLERANCE[kv_dtype])
    assert engine.stats().used_blocks == 0


def check(output: RequestOutput, request: Asked, dense: Callable[[Sequence[int]], Tensor], tolerance: float) -> None:
    num_prompt = len(request.prompt_ids)
    for sample in output.samples:
        token_ids = [*request.prompt_ids, *sample.token_ids]
        logprobs_CV = dense(token_ids)
        entries = [*output.prompt_logprobs, *sample.logprobs]
        expected = [float(logprobs_CV[i - 1, token_ids[i]]) for i in range(1, len(token_ids))]
        assert [entry.logprob for entry in entries] == pytest.approx(expected[-len(entries) :], abs=tolerance)
        if request.params.temperature == 0:
            best = logprobs_CV[num_prompt - 1 : -1].amax(-1)
            assert expected[num_prompt - 1 :] == pytest.approx(best.tolist(), abs=2 * tolerance)
