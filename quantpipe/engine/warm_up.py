"""The first steps of an engine, taken before anyone waits for them. Knows an engine from outside only."""

from collections.abc import Sequence
from typing import Protocol

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.request import StepOutput
from quantpipe.engine.sampling_params import SamplingParams

# A chunk; prompts for every other slot, if the chunk left no room for them; a decode of all.
NUM_STEPS = 3
# Longer chunks run the same kernels and would cost seconds: only buffers grow with them, which takes next to nothing.
MAX_CHUNK_TOKENS = 16


class SteppedEngine(Protocol):
    """The part of ``Engine`` that a warm-up uses."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def has_unfinished(self) -> bool: ...
    def add(self, prompt_ids: Sequence[int], params: SamplingParams) -> str: ...
    def step(self) -> list[StepOutput]: ...
    def abort(self, request_id: str) -> None: ...


def take_first_steps(engine: SteppedEngine) -> None:
    """Have a chunk and the largest decode computed once: kernels, sampling and buffers of both.

    Requests are aborted, not finished, so that nothing is learned from them.
    """
    config, max_len = engine.config, engine.max_model_len
    longest = min(config.max_num_batched_tokens, config.max_prefill_chunk or max_len, max_len - 1)
    chunk_len = max(1, min(longest, MAX_CHUNK_TOKENS))
    prompt_lens = [chunk_len] + [1] * (config.max_num_seqs - 1)
    request_ids = []
    try:
        for length in prompt_lens:
            max_tokens = min(NUM_STEPS + 1, max_len - length)
            # Both ways of choosing: the long prompt samples, the others are greedy.
            params = SamplingParams(max_tokens=max_tokens, temperature=float(length > 1), ignore_eos=True)
            request_ids.append(engine.add([0] * length, params))
        for _ in range(NUM_STEPS):
            engine.step()
    finally:
        for request_id in request_ids:
            engine.abort(request_id)
