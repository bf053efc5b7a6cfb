"""A model made of arithmetic: its logits depend on every token it reads back through the slots it was told to write.

A wrong slot, position, block table or context length changes the history it sees, and with it the tokens. So does a
block that was let go too early.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from quantpipe.backends.most_likely import most_likely
from quantpipe.backends.protocol import BatchInput, DecodeLimits
from quantpipe.engine import request
from quantpipe.engine.sampler import sample
from quantpipe.engine.sampling_params import SamplingParams
from tests.engine.schedules import samples_of

VOCAB = 31
MAX_POSITIONS = 4096


FACTORS = np.arange(MAX_POSITIONS) * 7919 + 31
TOKENS = (np.arange(VOCAB) + 1) * 40503


def logits_after(history: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Logits [VOCAB] after reading ``history``, whose entries are token_id * MAX_POSITIONS + position."""
    mixed = int(history @ FACTORS[: len(history)]) % 1_000_003
    return (TOKENS * (mixed * 2 + 1) % 65537 / 9000).astype(np.float32)


@dataclass(frozen=True)
class FakeKVCache:
    """Of each slot, the token and the position written there."""

    num_blocks: int
    block_size: int
    dtype: str
    slots: Tensor

    @property
    def num_bytes(self) -> int:
        return self.slots.nbytes

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        blocks = self.slots.view(self.num_blocks, -1)
        blocks[[destination for _, destination in copies]] = blocks[[source for source, _ in copies]]


class FakeExecutor:
    """``poison`` is a token id after which every logit is NaN; ``window`` is its own."""

    supports_windows = True

    def __init__(
        self, eos_token_ids: tuple[int, ...] = (), poison: int | None = None, window: int | None = None
    ) -> None:
        self.description = SimpleNamespace(
            vocab_size=VOCAB,
            max_position_embeddings=MAX_POSITIONS,
            eos_token_ids=eos_token_ids,
            windows=(window,),
        )
        self.window = window
        self.device = torch.device("cpu")
        self.weight_bytes = 0
        self.context_tokens = (0, 0)
        self.notes: tuple[str, ...] = ()
        self.step_times_s: dict[str, float] = {}
        self.poison = poison
        self.batch_sizes: list[int] = []
        self.fails = False

    def kv_bytes_per_block(self, block_size: int, dtype: str) -> int:
        return 8 * block_size

    def allocate_kv_cache(self, num_blocks: int, block_size: int, dtype: str) -> FakeKVCache:
        slots = torch.full((num_blocks * block_size,), -1)
        return FakeKVCache(num_blocks, block_size, dtype, slots)

    def record_decodes(self, kv_cache: FakeKVCache, limits: DecodeLimits) -> None:
        pass

    def forward(self, batch: BatchInput, kv_cache: FakeKVCache) -> Tensor:
        if self.fails:
            raise RuntimeError("out of memory")
        self.batch_sizes.append(len(batch.token_ids_T))
        assert len(set(batch.slot_mapping_T.tolist())) == len(batch.slot_mapping_T), "two tokens share a slot"
        kv_cache.slots[batch.slot_mapping_T] = batch.token_ids_T * MAX_POSITIONS + batch.positions_T
        logits, token = [], 0
        wanted, slots = set(batch.logit_rows_R.tolist()), kv_cache.slots.numpy()
        block_size, form = kv_cache.block_size, (batch.num_sinks, batch.layer_window(self.window))
        num_first = -(-batch.num_sinks // block_size) * block_size
        held_lens = batch.held_lens(block_size)
        for row, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
            offsets = np.arange(held_lens[row])
            blocks = batch.block_table_SB[row].numpy()[offsets // block_size]
            history = slots[blocks * block_size + offsets % block_size]
            positions = offsets + (offsets >= num_first) * (context_len - held_lens[row])
            for length in range(context_len - query_len + 1, context_len + 1):
                if token in wanted:
                    seen = visible_positions(length, form)
                    assert np.isin(seen, positions).all(), "a block was let go that can still be seen"
                    logits.append(logits_after(history[np.isin(positions, seen)]))
                    if batch.token_ids_T[token] == self.poison:
                        logits[-1] = np.full(VOCAB, np.nan, dtype=np.float32)
                token += 1
        assert token == len(batch.token_ids_T)
        return torch.from_numpy(np.stack(logits)) if logits else torch.empty(0, VOCAB)

    def forward_greedy(self, batch: BatchInput, kv_cache: FakeKVCache) -> Tensor:
        return most_likely(self.forward(batch, kv_cache))


# Number of sinks, and the window.
Form = tuple[int, int | None]
FULL: Form = (0, None)


def visible_positions(length: int, form: Form) -> npt.NDArray[np.int64]:
    """What the last of ``length`` tokens sees."""
    positions = np.arange(length)
    num_sinks, window = form
    return positions if window is None else positions[(positions < num_sinks) | (positions >= length - window)]


class OracleDrafter:
    """Guesses what the model will choose, but for ``wrong_frac`` of the tokens, which are off by one."""

    def __init__(self, wrong_frac: float = 0.0, form: Form = FULL) -> None:
        self.wrong_frac = wrong_frac
        self.form = form
        self.rng = Random(0)
        self.num_drafts: list[int] = []
        self.forgotten: list[request.Sequence] = []

    def propose(self, wanted: list[tuple[request.Sequence, int]]) -> list[tuple[int, ...]]:
        self.num_drafts += [num for _, num in wanted]
        return [self._guess(seq, num) for seq, num in wanted]

    def forget(self, seq: request.Sequence) -> None:
        self.forgotten.append(seq)

    def _guess(self, seq: request.Sequence, num: int) -> tuple[int, ...]:
        token_ids, sampled = list(seq.token_ids), seq.sampled().after(())
        for _ in range(num):
            [token_id] = sample(dense_logits(token_ids, self.form).numpy()[None], [sampled])
            if token_id is None or self.rng.random() < self.wrong_frac:
                token_id = (token_ids[-1] + 1) % VOCAB
            token_ids.append(token_id)
            sampled.append(token_id)
        return tuple(token_ids[len(seq.token_ids) :])


def dense_greedy(
    prompt_ids: Sequence[int], num_new: int, stop: frozenset[int] = frozenset(), form: Form = FULL
) -> tuple[int, ...]:
    """What the same model generates alone, with no cache, batch or schedule."""
    token_ids = list(prompt_ids)
    while len(token_ids) < len(prompt_ids) + num_new:
        token_ids.append(int(dense_logits(token_ids, form).argmax()))
        if token_ids[-1] in stop:
            break
    return tuple(token_ids[len(prompt_ids) :])


def dense_samples(
    prompt_ids: Sequence[int], params: SamplingParams, eos_token_ids: Iterable[int] = (), form: Form = FULL
) -> list[tuple[int, ...]]:
    """What the same model generates for each of a seeded request's samples, one after the other, each alone."""
    return samples_of(partial(dense_logits, form=form), prompt_ids, params, eos_token_ids)


def dense_logits(token_ids: Sequence[int], form: Form = FULL) -> Tensor:
    seen = visible_positions(len(token_ids), form)
    return torch.from_numpy(logits_after(np.array(token_ids)[seen] * MAX_POSITIONS + seen))


@pytest.fixture(scope="session")
def fake_model() -> SimpleNamespace:
    return SimpleNamespace(
        executor=FakeExecutor,
        oracle=OracleDrafter,
        dense_greedy=dense_greedy,
        dense_samples=dense_samples,
        dense_logits=dense_logits,
        visible_positions=visible_positions,
        vocab_size=VOCAB,
    )


@pytest.fixture(autouse=True, scope="package")
def single_thread() -> Iterator[None]:
    """Matrices are tiny here: more threads only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
