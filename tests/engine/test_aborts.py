"""Ten thousand requests given up at any moment: not one block, slot or output is left behind."""

import dataclasses
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from quantpipe.backends.most_likely import most_likely
from quantpipe.backends.protocol import BatchInput, DecodeLimits
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import SamplingParams
from quantpipe.errors import QuantpipeError

VOCAB = 16
NUM_BLOCKS = 16
CONFIG = EngineConfig(
    max_model_len=64,
    block_size=4,
    num_kv_blocks=NUM_BLOCKS,
    max_num_seqs=6,
    max_num_batched_tokens=24,
    admission="greedy",
)


class FastExecutor:
    """Logits that depend on the token and its position only; nothing is cached, and token 15 leads to none at all."""

    def __init__(self) -> None:
        self.description = SimpleNamespace(
            vocab_size=VOCAB, max_position_embeddings=64, eos_token_ids=(0,), windows=(None,)
        )
        self.supports_windows = True
        self.device = torch.device("cpu")
        self.weight_bytes = 0
        self.notes: tuple[str, ...] = ()
        self.context_tokens = (0, 0)
        self.step_times_s: dict[str, float] = {}
        self._table = torch.randn(64, VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
        self._table[:, 15] = torch.nan

    def kv_bytes_per_block(self, block_size: int, dtype: str) -> int:
        return 1

    def allocate_kv_cache(self, num_blocks: int, block_size: int, dtype: str) -> SimpleNamespace:
        return SimpleNamespace(num_blocks=num_blocks, block_size=block_size, notes=(), copy_blocks=lambda copies: None)

    def record_decodes(self, kv_cache: SimpleNamespace, limits: DecodeLimits) -> None:
        pass

    def forward(self, batch: BatchInput, kv_cache: SimpleNamespace) -> Tensor:
        rows = batch.logit_rows_R
        return self._table[batch.positions_T[rows], batch.token_ids_T[rows]]

    def forward_greedy(self, batch: BatchInput, kv_cache: SimpleNamespace) -> Tensor:
        return most_likely(self.forward(batch, kv_cache))


def random_params(rng: random.Random) -> SamplingParams:
    max_tokens = rng.randrange(26)
    return SamplingParams(
        n=rng.choice([1, 1, 2, 3, 6]) if max_tokens else 1,
        max_tokens=max_tokens,
        ignore_eos=rng.random() < 0.8,
        seed=rng.getrandbits(32),
        temperature=rng.choice([0.0, 1.5]),
        prompt_logprobs=0 if rng.random() < 0.1 else None,
    )


def state_of(engine: Engine, request_id: str) -> str:
    """Where a request is, for the record of what was tried."""
    group = engine._unfinished.get(request_id)
    if group is None:
        return "finished"
    first = group.seqs[0]
    if any(seq.num_seen_tokens and seq not in engine._scheduler.running for seq in group.unended):
        return "preempted"
    if first.num_pending_forks == 0 and len(group.seqs) > 1:
        return "partly ended" if len(group.unended) < len(group.seqs) else "forked"
    if first in engine._scheduler.running:
        return "decoding" if first.num_generated_tokens else "prefilling"
    return "waiting"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_thousands_of_random_aborts_leak_nothing(prefix_cache: bool) -> None:
    rng = random.Random(prefix_cache)
    engine = Engine(FastExecutor(), dataclasses.replace(CONFIG, prefix_cache=prefix_cache))
    heads = [[rng.randrange(1, 15) for _ in range(30)] for _ in range(3)]
    alive: list[str] = []
    states: Counter[str] = Counter()
    while states.total() < 5000:
        while len(alive) < 10:
            prompt = rng.choice(heads)[: rng.randrange(1, 30)] + [
                rng.randrange(1, 15 + (rng.random() < 0.02)) for _ in range(rng.randrange(9))
            ]
            alive.append(engine.add(prompt, random_params(rng)))
        for output in engine.step():
            if output.finish_reason is None and rng.random() < 0.05:
                engine.abort_sample(output.request_id, output.index)
        for _ in range(rng.randrange(1, 9) if rng.random() < 0.25 else 0):
            # Of a few, the one in the state that was met least.
            victim = min(rng.sample(alive, 3), key=lambda request_id: states[state_of(engine, request_id)])
            alive.remove(victim)
            states[state_of(engine, victim)] += 1
            engine.abort(victim)
        stats = engine.stats()
        assert stats.used_blocks + stats.cached_blocks + stats.free_blocks == NUM_BLOCKS
        assert stats.num_running <= CONFIG.max_num_seqs
    assert len(states) == 7 and min(states.values()) > 3, states
    assert stats.num_preemptions > 10 and stats.nonfinite_failures > 20
    for request_id in alive:
        engine.abort(request_id)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.used_blocks) == (0, 0, 0)
    assert not (engine.has_unfinished or engine._outputs or engine._unfinished)
    assert len(engine._prefix_cache) == stats.cached_blocks
    assert all(engine._pool.num_references(block) == 0 for block in range(NUM_BLOCKS))


def test_idle_engine_whose_blocks_do_not_add_up_says_so_and_loses_no_output() -> None:
    engine = Engine(FastExecutor(), CONFIG)
    engine.add([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True), "a")
    engine.step()
    engine._pool.allocate(2)  # as a leak would
    with pytest.raises(QuantpipeError, match=r"nothing runs, yet of 16 KV blocks 2 are held, .* this is a bug"):
        engine.step()
    [output] = engine.step()
    assert output.finish_reason is not None
    assert len(engine.take_output("a").token_ids) == 2
    engine.add([1, 2, 3], SamplingParams(max_tokens=2), "b")
    with pytest.raises(QuantpipeError, match="this is a bug"):
        engine.abort("b")
