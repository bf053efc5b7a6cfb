"""Windows and sinks on real backends: preemption, forks and chunks change no token, and text goes on without end."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from quantpipe.backends import BACKENDS
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import RequestOutput, SamplingParams
from quantpipe.formats.kv_mode import KV_MODES

# Float32 sums in another order, and where keys and values are quantized, one that then rounds the other way.
TOLERANCE = {kv_dtype: 1e-4 if kv_dtype == "auto" else 5e-2 for kv_dtype in KV_MODES}
CONFIG = EngineConfig(
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    num_kv_blocks=60,
    admission="greedy",
    sink_tokens=3,
    window_tokens=10,
)
MODES = sorted(KV_MODES.keys() - {"auto"})
PROMPTS = [[i, 2 * i + 1, 3 * i + 5] * 3 for i in range(1, 5)]


@pytest.fixture(scope="module")
def folder(random_llama: Callable[..., Path], add_kv_scales: Callable[[Path], Path]) -> Path:
    return add_kv_scales(random_llama(num_hidden_layers=3))


def generate(folder: Path, config: EngineConfig) -> tuple[list[RequestOutput], Engine]:
    engine = Engine.open(folder, config)
    return engine.generate(PROMPTS, SamplingParams(max_tokens=70, ignore_eos=True, logprobs=0)), engine


def after_interruption(folder: Path, config: EngineConfig) -> tuple[RequestOutput, list[int]]:
    """A sequence that has come to 60 tokens when two others push in, and where it stood one step after it was back."""
    engine = Engine.open(folder, config)
    request_id = engine.add(PROMPTS[0], SamplingParams(max_tokens=70, ignore_eos=True, logprobs=0))
    for _ in range(52):
        engine.step()
    for prompt in PROMPTS[1:3]:
        engine.add(prompt, SamplingParams(max_tokens=20, ignore_eos=True), priority=-20)
    [seq] = engine._unfinished[request_id].seqs
    stood, is_back = seq.num_computed_tokens, []
    while engine.has_unfinished:
        engine.step()
        if stood == 0 < seq.num_computed_tokens:
            is_back.append(seq.num_computed_tokens)
        stood = seq.num_computed_tokens
    return engine.take_output(request_id), is_back


@pytest.mark.parametrize(
    ("backend", "kv_dtype"), [*((backend, "auto") for backend in sorted(BACKENDS)), *(("cpu", mode) for mode in MODES)]
)
def test_preempted_sequence_gets_the_tokens_of_a_large_pool(folder: Path, backend: str, kv_dtype: str) -> None:
    """Of three layers: what is read again right behind the gap is wrong there, and out of sight where it matters."""
    config = dataclasses.replace(CONFIG, backend=backend, kv_dtype=kv_dtype, policy="priority", prefix_cache=False)
    expected, none = after_interruption(folder, config)
    found, is_back = after_interruption(folder, dataclasses.replace(config, num_kv_blocks=9))
    assert not none and is_back
    assert all(num_computed > 25 for num_computed in is_back), "the sinks, then all that can matter and no more"
    assert found.token_ids == expected.token_ids
    assert [entry.logprob for entry in found.logprobs] == pytest.approx(
        [entry.logprob for entry in expected.logprobs], abs=TOLERANCE[kv_dtype]
    )


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_what_was_generated_has_the_same_probabilities_as_a_prompt(folder: Path, backend: str) -> None:
    outputs, engine = generate(folder, dataclasses.replace(CONFIG, backend=backend))
    for output in outputs:
        text = (*output.prompt_ids, *output.token_ids)
        [scored] = engine.generate([text], SamplingParams(max_tokens=0, prompt_logprobs=0))
        assert [entry.logprob for entry in scored.prompt_logprobs[len(output.prompt_ids) - 1 :]] == pytest.approx(
            [entry.logprob for entry in output.logprobs], abs=TOLERANCE["auto"]
        )
        # Not scored, most of it need not be read at all.
        [last] = engine.generate([text[:-1]], SamplingParams(max_tokens=1, logprobs=0))
        assert last.logprobs[0].logprob == pytest.approx(output.logprobs[-1].logprob, abs=TOLERANCE["auto"])


def test_generation_of_20000_tokens_runs_in_constant_memory_and_stays_finite(
    random_llama: Callable[..., Path],
) -> None:
    """Guessing makes it quick: greedy text of a random model soon repeats itself."""
    config = EngineConfig(
        block_size=16,
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=32,
        sink_tokens=4,
        window_tokens=40,
        speculative="ngram",
        num_draft_tokens=31,
    )
    engine = Engine.open(random_llama(num_hidden_layers=1, max_position_embeddings=64), config)
    request_id = engine.add([1, 2, 3], SamplingParams(max_tokens=20_000, ignore_eos=True, logprobs=0))
    num_logprobs, most_held = 0, 0
    while engine.has_unfinished:
        for output in engine.step():
            assert all(math.isfinite(entry.logprob) for entry in output.logprobs)
            num_logprobs += len(output.logprobs)
        stats = engine.stats()
        assert stats.used_blocks + stats.cached_blocks + stats.free_blocks == stats.total_blocks
        most_held = max(most_held, stats.used_blocks)
    assert len(engine.take_output(request_id).token_ids) == num_logprobs == 20_000
    # The sinks' block, and those that a window and the guesses of one step may touch.
    assert most_held <= 1 + math.ceil((40 + 32 - 2) / 16) + 1 == 7
    assert engine.stats().nonfinite_failures == 0
