"""Recorded decode steps: padded, over memory that stays where it is. What is recorded runs here as it is."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantpipe.backends.protocol import BatchInput, DecodeLimits
from quantpipe.backends.reference import ReferenceBackend
from quantpipe.backends.triton import TritonBackend
from quantpipe.backends.triton.executor import TritonExecutor
from quantpipe.backends.triton.graphs import DirectRecorder, RecordedDecodes, Replay, ladder
from quantpipe.backends.triton.kv_cache import TritonKVCache

BLOCK_SIZE, MAX_BLOCKS = 4, 6
LIMITS = DecodeLimits(max_num_seqs=4, max_blocks=MAX_BLOCKS)


@pytest.fixture(scope="module")
def folder(random_llama: Callable[..., Path]) -> Path:
    return random_llama(num_hidden_layers=1, vocab_size=64)


@pytest.fixture(scope="module")
def executor(folder: Path) -> TritonExecutor:
    return TritonBackend().load(folder, 127.0, None)


def step_of(seqs: dict[int, list[int]], tables: dict[int, list[int]], num_new: int, **fields: object) -> BatchInput:
    """The last ``num_new`` tokens of each sequence over its blocks; logits of the last of each."""
    tokens, positions, slots, rows, ends = [], [], [], [], []
    for name, token_ids in seqs.items():
        for position in range(len(token_ids) - num_new, len(token_ids)):
            tokens.append(token_ids[position])
            positions.append(position)
            slots.append(tables[name][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        rows.append(len(tokens) - 1)
        ends.append(len(token_ids))
    widest = max(-(-end // BLOCK_SIZE) for end in ends)
    table_SB = torch.tensor([(tables[name] + [0] * widest)[:widest] for name in seqs])
    numbers = [torch.tensor(part) for part in (tokens, positions, slots)]
    return BatchInput(*numbers, (num_new,) * len(seqs), tuple(ends), table_SB, torch.tensor(rows), **fields)  # type: ignore[arg-type]


TABLES = {0: [9, 2, 11, 0, 7, 5], 1: [1, 3, 4, 8, 6, 10], 2: [12, 13, 14, 15, 16, 17], 3: [18, 19, 20, 21, 22, 23]}
PROMPTS = {0: [5, 9, 33], 1: [1, 2, 3], 2: [40, 41, 7], 3: [8, 60, 22]}


class Counting:
    """Counts how often what was recorded runs again. With ``runs_first`` it runs as it is recorded, as graphs do."""

    def __init__(self, runs_first: bool = False) -> None:
        self.num_replays = 0
        self._runs_first = runs_first

    def record(self, work: Replay) -> Replay:
        if self._runs_first:
            work()

        def replay() -> None:
            self.num_replays += 1
            work()

        return replay


def recorded_over(
    executor: TritonExecutor, kv: TritonKVCache, limits: DecodeLimits = LIMITS, runs_first: bool = False
) -> Counting:
    counting = Counting(runs_first)
    decodes = RecordedDecodes(limits, kv, executor.run, executor.description.vocab_size, executor.device, counting)
    executor.recorded[:] = [decodes]
    return counting


def test_padded_steps_of_every_size_give_the_references_tokens(folder: Path, executor: TritonExecutor) -> None:
    reference = ReferenceBackend().load(folder, 127.0, None)
    kv, expected_kv = (backend.allocate_kv_cache(24, BLOCK_SIZE, "auto") for backend in (executor, reference))
    counting = recorded_over(executor, kv, runs_first=True)
    untouched = [tensor.clone() for store in (kv.keys, kv.values) for tensor in store.tensors]
    assert not any(tensor.any() for tensor in untouched), "recording wrote into blocks"
    seqs = {name: list(ids) for name, ids in PROMPTS.items()}
    prompts = step_of(seqs, TABLES, 3)
    chosen, wanted = executor.forward_greedy(prompts, kv), reference.forward_greedy(prompts, expected_kv)
    assert counting.num_replays == 0, "a chunk is no decode"
    # Fewer and more sequences: rows that fill up must forget what stood there.
    present = [(0, 1, 2, 3), (0, 2, 3), (3,), (2, 1, 0)]
    last = dict(zip(seqs, chosen.tolist(), strict=True))
    assert chosen.tolist() == wanted.tolist()
    for step, names in enumerate(present):
        for name in names:
            seqs[name].append(last[name])
        batch = step_of({name: seqs[name] for name in names}, TABLES, 1)
        chosen, wanted = executor.forward_greedy(batch, kv), reference.forward_greedy(batch, expected_kv)
        assert chosen.tolist() == wanted.tolist()
        assert counting.num_replays == step + 1
        last |= dict(zip(names, chosen.tolist(), strict=True))
    for store, expected in ((kv.keys, expected_kv.keys), (kv.values, expected_kv.values)):
        found = store.codes[0].transpose(1, 2)
        torch.testing.assert_close(found, expected[0].codes.view_as(found), rtol=1e-4, atol=1e-5)


def test_logits_are_those_of_the_step_by_itself_and_stay(executor: TritonExecutor) -> None:
    def logits(is_recorded: bool) -> list[Tensor]:
        kv = executor.allocate_kv_cache(24, BLOCK_SIZE, "int8_per_token_head")
        recorded_over(executor, kv)
        if not is_recorded:
            executor.recorded.clear()
        first = executor.forward(step_of({0: [5], 1: [7], 2: [9]}, TABLES, 1), kv)
        return [first, executor.forward(step_of({1: [7, 3], 2: [9, 3]}, TABLES, 1), kv)]

    for found, wanted in zip(logits(True), logits(False), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "batch",
    [
        step_of({0: [5, 9]}, TABLES, 2),
        step_of({0: [5], 1: [6], 2: [7], 3: [8], 4: [9]}, TABLES | {4: [0]}, 1),
        step_of({0: [5] * 29}, {0: list(range(8))}, 1),
        step_of({0: [5]}, TABLES, 1, num_sinks=1, window=8),
    ],
    ids=["chunk", "more sequences", "longer table", "window"],
)
def test_other_steps_run_by_themselves(executor: TritonExecutor, batch: BatchInput) -> None:
    kv = executor.allocate_kv_cache(24, BLOCK_SIZE, "auto")
    counting = recorded_over(executor, kv)
    assert len(executor.forward_greedy(batch, kv)) == len(batch.logit_rows_R)
    assert counting.num_replays == 0


def test_decodes_over_another_cache_run_by_themselves(executor: TritonExecutor) -> None:
    own, other = (executor.allocate_kv_cache(24, BLOCK_SIZE, "auto") for _ in range(2))
    counting = recorded_over(executor, own)
    executor.forward_greedy(step_of({0: [5]}, TABLES, 1), other)
    assert counting.num_replays == 0
    assert other.keys.codes.any() and not own.keys.codes.any()


def test_windows_and_dropped_blocks_are_replayed(executor: TritonExecutor) -> None:
    limits = DecodeLimits(2, MAX_BLOCKS, num_sinks=2, window=11)
    token_ids = list(range(1, 15))
    # The window reaches from behind the dropped block into the rest of the sink block: where it ends depends on both.
    dropped = 1
    table = {0: [9, *TABLES[1]]}
    outputs = []
    for is_recorded in (True, False):
        kv = executor.allocate_kv_cache(24, BLOCK_SIZE, "auto")
        recorded_over(executor, kv, limits)
        if not is_recorded:
            executor.recorded.clear()
        executor.forward_greedy(step_of({0: token_ids[:-1]}, table, 13, num_sinks=2, window=11), kv)
        step = step_of({0: token_ids}, table, 1, num_sinks=2, window=11)
        held = torch.cat([step.block_table_SB[:, :1], step.block_table_SB[:, 1 + dropped :]], 1)
        gone = BatchInput(
            *(step.token_ids_T, step.positions_T, step.slot_mapping_T, step.query_lens, step.context_lens),
            block_table_SB=held,
            logit_rows_R=step.logit_rows_R,
            num_sinks=2,
            window=11,
            dropped_blocks=(dropped,),
        )
        outputs.append(executor.forward(gone, kv))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_ladder_reaches_the_largest_batch_and_no_further() -> None:
    assert ladder(1) == (1,)
    assert ladder(6) == (1, 2, 4, 6)
    assert ladder(8) == (1, 2, 4, 8)
    assert ladder(17) == (1, 2, 4, 8, 16, 17)
    assert ladder(32) == (1, 2, 4, 8, 16, 24, 32)


def test_engine_records_what_it_may_ask_for(executor: TritonExecutor) -> None:
    kv = executor.allocate_kv_cache(24, BLOCK_SIZE, "auto")
    executor.record_decodes(kv, LIMITS)
    [recorded] = executor.recorded
    assert (recorded.limits, recorded.kv, recorded.sizes) == (LIMITS, kv, (1, 2, 4))
    assert DirectRecorder().record(print) is print
