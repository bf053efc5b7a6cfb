"""What the engine adds to a step: a model that answers at once, processor time of one thread.

    python bench/step_cost.py --num-seqs 1 8 32 --context-tokens 200

For each number of sequences that decode: milliseconds of processor time per step of the engine, greedy and sampled, and
of the text of each token where ``--model`` names a folder with a tokenizer. ``--profile`` tells where they go.
"""

import argparse
import cProfile
import pstats
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from quantpipe.backends.protocol import BatchInput, DecodeLimits
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import SamplingParams
from quantpipe.engine.tokenizer import Tokenizer

VOCAB = 49_152


class Instant:
    """A model whose every token is the same."""

    def __init__(self) -> None:
        self.description: Any = SimpleNamespace(
            vocab_size=VOCAB, max_position_embeddings=4096, eos_token_ids=(), windows=(None,)
        )
        self.device = torch.device("cpu")
        self.weight_bytes = 0
        self.notes: tuple[str, ...] = ()
        self.context_tokens = (0, 0)
        self.step_times_s: dict[str, float] = {}
        self.supports_windows = True
        self._logits_V = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))

    def kv_bytes_per_block(self, block_size: int, dtype: str) -> int:
        return 1

    def allocate_kv_cache(self, num_blocks: int, block_size: int, dtype: str) -> Any:
        return SimpleNamespace(num_blocks=num_blocks, block_size=block_size, copy_blocks=lambda copies: None)

    def record_decodes(self, kv_cache: Any, limits: DecodeLimits) -> None:
        pass

    def forward(self, batch: BatchInput, kv_cache: Any) -> Tensor:
        return self._logits_V.expand(len(batch.logit_rows_R), -1)

    def forward_greedy(self, batch: BatchInput, kv_cache: Any) -> Tensor:
        return torch.full((len(batch.logit_rows_R),), 7)


def decoding(num_seqs: int, context_tokens: int, params: SamplingParams) -> Engine:
    """An engine in which so many sequences decode."""
    config = EngineConfig(max_num_seqs=num_seqs, max_num_batched_tokens=max(512, num_seqs), kv_cache_memory=1 << 20)
    engine = Engine(Instant(), config)
    for number in range(num_seqs):
        engine.add([1 + number] * context_tokens, params)
    while engine.stats().generated_tokens < 2 * num_seqs:
        engine.step()
    return engine


def step_ms(engine: Engine, streams: Sequence[Any], num_steps: int) -> float:
    """Processor time of a step, and of the text of its tokens where there are ``streams``."""
    started_s = time.thread_time()
    for _ in range(num_steps):
        outputs = engine.step()
        for stream, output in zip(streams, outputs, strict=False):
            stream.push(output.token_ids)
    return 1e3 * (time.thread_time() - started_s) / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context-tokens", type=int, default=200)
    parser.add_argument("--num-steps", type=int, default=500)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    tokenizer = None if asked.model is None else Tokenizer.open(asked.model)
    print("| sequences | greedy ms | sampled ms | greedy and text ms |\n|---|---|---|---|")
    for num_seqs in asked.num_seqs:
        cells = []
        for temperature, has_text in ((0.0, False), (0.7, False), (0.0, True)):
            params = SamplingParams(max_tokens=3000, temperature=temperature, ignore_eos=True)
            engine = decoding(num_seqs, asked.context_tokens, params)
            streams = [tokenizer.stream() for _ in range(num_seqs)] if has_text and tokenizer is not None else []
            cells.append(f"{step_ms(engine, streams, asked.num_steps if temperature == 0 else 50):.3f}")
        print(f"| {num_seqs} | {' | '.join(cells)} |", flush=True)
    if asked.profile:
        engine = decoding(asked.num_seqs[-1], asked.context_tokens, SamplingParams(max_tokens=3000, temperature=0.0))
        profile = cProfile.Profile()
        profile.runcall(step_ms, engine, [], asked.num_steps)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
