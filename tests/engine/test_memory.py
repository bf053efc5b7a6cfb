"""The pool's size from bytes or from a share of the memory, and what the rest of it is for."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantpipe.backends import BACKENDS
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.device_memory import HostMemory
from quantpipe.engine.engine import Engine
from quantpipe.engine.memory import (
    StepMemory,
    kv_cache_bytes_within,
    largest_batch,
    largest_decode,
    profile_steps,
)
from quantpipe.engine.request import RequestOutput, SamplingParams
from quantpipe.errors import RecipeError

CONFIG = EngineConfig(max_model_len=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)
BLOCK_BYTES = 32  # of the fake model
STEP = StepMemory(activation_bytes=100, workspace_bytes=50)


@dataclass
class Device:
    """A device that tells what it was told."""

    total: int = 1000
    available: int = 1000
    used: int = 70
    peak: int = 95
    num_resets: int = 0

    def total_bytes(self) -> int:
        return self.total

    def available_bytes(self) -> int:
        return self.available

    def used_bytes(self) -> int:
        return self.used

    def peak_bytes(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.num_resets += 1


def test_share_of_the_memory_is_for_weights_steps_and_then_blocks() -> None:
    assert kv_cache_bytes_within(0.9, 200, STEP, Device()) == 900 - 350
    assert kv_cache_bytes_within(0.3, 200, STEP, Device()) == 0


def test_share_that_others_have_taken_already_is_refused_with_the_largest_that_works() -> None:
    device = Device(available=400)
    with pytest.raises(RecipeError, match=r"0\.9 of 1,000 bytes leaves 550 .* 300 are available; lower it to 0\.65$"):
        kv_cache_bytes_within(0.9, 200, STEP, device)
    assert kv_cache_bytes_within(0.65, 200, STEP, device) == 300


@pytest.mark.parametrize("max_num_seqs", [1, 4, 16])
def test_profile_runs_the_largest_chunk_and_the_largest_decode(fake_model: SimpleNamespace, max_num_seqs: int) -> None:
    executor, device = fake_model.executor(), Device(available=BLOCK_BYTES * 1000)
    executor.weight_bytes = 60
    config = dataclasses.replace(CONFIG, max_num_seqs=max_num_seqs)
    step = profile_steps(executor, config, "auto", 64, 8, device)
    assert executor.batch_sizes == [16, max_num_seqs]
    assert step == StepMemory(activation_bytes=25, workspace_bytes=10)
    assert device.num_resets == 1


@pytest.mark.parametrize(
    ("num_seqs", "query_len", "context_len", "num_rows"), [(1, 7, 7, 3), (1, 1, 9, 1), (3, 1, 1, 1), (3, 1, 10, 1)]
)
def test_largest_batch_writes_each_token_to_the_slot_its_table_names(
    num_seqs: int, query_len: int, context_len: int, num_rows: int
) -> None:
    batch = largest_batch(num_seqs, query_len, context_len, num_rows, num_shared_blocks=3, block_size=4)
    assert len(set(batch.slot_mapping_T.tolist())) == num_seqs * query_len == len(batch.token_ids_T)
    assert int(batch.slot_mapping_T.max()) < (3 + num_seqs) * 4
    for s in range(num_seqs):
        rows = slice(s * query_len, (s + 1) * query_len)
        positions = list(range(context_len - query_len, context_len))
        assert batch.positions_T[rows].tolist() == positions
        table = batch.block_table_SB[s]
        assert batch.slot_mapping_T[rows].tolist() == [int(table[p // 4]) * 4 + p % 4 for p in positions]
    last_rows = [(s + 1) * query_len - num_rows + i for s in range(num_seqs) for i in range(num_rows)]
    assert batch.logit_rows_R.tolist() == last_rows


def test_bytes_given_are_all_used_where_prefixes_can_fill_them(fake_model: SimpleNamespace) -> None:
    config = dataclasses.replace(CONFIG, kv_cache_memory=BLOCK_BYTES * 100 + 31)
    engine = Engine(fake_model.executor(), config)
    assert engine.stats().total_blocks == 100
    assert (engine.memory.kv_cache_bytes, engine.memory.step) == (BLOCK_BYTES * 100, None)
    without = dataclasses.replace(config, prefix_cache=False)
    assert Engine(fake_model.executor(), without).stats().total_blocks == 64  # all that four sequences can hold
    assert Engine(fake_model.executor(), CONFIG).stats().total_blocks == 64


def test_share_of_this_machine_sizes_the_pool_after_a_profile(fake_model: SimpleNamespace) -> None:
    executor = fake_model.executor()
    executor.kv_bytes_per_block = lambda block_size, dtype: 1 << 20
    share = (HostMemory().used_bytes() + (300 << 20)) / HostMemory().total_bytes()
    engine = Engine(executor, dataclasses.replace(CONFIG, memory_utilization=share))
    step = engine.memory.step
    assert step is not None and step.workspace_bytes > 50 << 20  # the interpreter and torch
    # 300 MiB, less what the profile itself added to the process.
    assert 150 < engine.stats().total_blocks <= 310
    assert executor.batch_sizes == [16, 4]
    assert engine.generate([[1, 2]], SamplingParams(max_tokens=5))[0].token_ids == fake_model.dense_greedy([1, 2], 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_utilization": 0.0}, r"engine.memory_utilization: 0.0 is outside \(0, 1\]"),
        ({"memory_utilization": float("nan")}, r"engine.memory_utilization: nan is outside \(0, 1\]"),
        ({"memory_utilization": 1.5}, r"engine.memory_utilization: 1.5 is outside \(0, 1\]"),
        ({"kv_cache_memory": 0}, "engine.kv_cache_memory: 0 is below 1"),
        (
            {"kv_cache_memory": 9, "memory_utilization": 0.5},
            "engine.memory_utilization: the pool .* sized by engine.kv_cache_memory already; give one",
        ),
        ({"num_kv_blocks": 9, "kv_cache_memory": 9}, "engine.kv_cache_memory: the pool .* engine.num_kv_blocks"),
    ],
)
def test_setting_that_cannot_size_a_pool_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_share_too_small_for_one_sequence_is_refused(fake_model: SimpleNamespace) -> None:
    with pytest.raises(RecipeError, match=r"engine.memory_utilization: 1e-06 leaves 0 bytes .* takes 512; raise it$"):
        Engine(fake_model.executor(), dataclasses.replace(CONFIG, memory_utilization=1e-6))


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_real_model_in_a_share_of_the_memory_gives_the_tokens_it_gives_in_a_default_pool(
    random_llama: Callable[..., Path], backend: str
) -> None:
    folder = random_llama(tie_word_embeddings=False)
    config = dataclasses.replace(CONFIG, backend=backend)
    share = (HostMemory().used_bytes() + (400 << 20)) / HostMemory().total_bytes()

    def run(config: EngineConfig) -> tuple[Engine, list[RequestOutput]]:
        engine = Engine.open(folder, config)
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        return engine, engine.generate([[1, 2, 3], list(range(40))], params)

    shared, found = run(dataclasses.replace(config, memory_utilization=share))
    _, expected = run(config)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert shared.memory.weight_bytes > 0
    assert shared.stats().total_blocks > 64
    assert shared.memory.kv_cache_bytes == shared._runner.kv_cache.num_bytes < 410 << 20


def test_largest_decode_counts_guesses_as_far_as_the_budget_goes() -> None:
    assert largest_decode(EngineConfig()) == 1
    assert largest_decode(EngineConfig(speculative="ngram", num_draft_tokens=6)) == 7
    assert largest_decode(EngineConfig(speculative="ngram", max_num_seqs=16, max_num_batched_tokens=40)) == 2
