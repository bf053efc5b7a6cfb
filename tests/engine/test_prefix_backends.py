"""Prefix sharing on real backends: what is found gives the tokens and log-probabilities of what is computed."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantpipe.backends import BACKENDS
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import RequestOutput, SamplingParams
from quantpipe.formats.kv_mode import KV_MODES

VOCAB = 128
# Float32 sums in another order, and where keys and values are quantized, one that then rounds the other way.
TOLERANCE = {kv_dtype: 1e-4 if kv_dtype == "auto" else 2e-2 for kv_dtype in KV_MODES}
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True, logprobs=0)
CONFIG = EngineConfig(
    block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=12, num_kv_blocks=64, admission="greedy"
)


@pytest.fixture(scope="module")
def folder(random_llama: Callable[..., Path], add_kv_scales: Callable[[Path], Path]) -> Path:
    return add_kv_scales(random_llama(tie_word_embeddings=False))


def prompts_with_a_common_head() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    head = torch.randint(VOCAB, (16,), generator=generator).tolist()
    tails = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in (1, 3, 4, 9, 12)]
    return [head, *(head + tail for tail in tails), head]


def one_after_another(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    """So that each finds what those before it computed."""
    return [engine.generate([prompt], params)[0] for prompt in prompts]


def logprobs_of(outputs: list[RequestOutput]) -> list[float]:
    return [entry.logprob for output in outputs for entry in output.logprobs]


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("kv_dtype", KV_MODES)
def test_greedy_tokens_are_the_same_with_and_without_the_prefix_cache(
    folder: Path, backend: str, kv_dtype: str
) -> None:
    config = dataclasses.replace(CONFIG, backend=backend, kv_dtype=kv_dtype)
    sharing, alone = (Engine.open(folder, dataclasses.replace(config, prefix_cache=is_on)) for is_on in (True, False))
    prompts = prompts_with_a_common_head()
    found, computed = (one_after_another(engine, prompts, GREEDY) for engine in (sharing, alone))
    assert [output.token_ids for output in found] == [output.token_ids for output in computed]
    assert sharing.stats().prefix_hit_tokens == 5 * 16 + 12
    assert alone.stats().prefix_hit_tokens == 0
    assert logprobs_of(found) == pytest.approx(logprobs_of(computed), abs=TOLERANCE[kv_dtype])


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_long_generations_that_share_a_prefix_in_a_small_pool_get_the_tokens_of_a_large_one(
    folder: Path, backend: str
) -> None:
    prompts = [[*range(40, 48), i] for i in range(6)]
    params = SamplingParams(max_tokens=22, ignore_eos=True)
    config = dataclasses.replace(CONFIG, backend=backend, max_model_len=32, max_num_seqs=6)
    small, large = (
        Engine.open(folder, dataclasses.replace(config, num_kv_blocks=num_blocks)) for num_blocks in (8, 100)
    )
    found, expected = ([output.token_ids for output in engine.generate(prompts, params)] for engine in (small, large))
    assert found == expected
    assert small.stats().num_preemptions > 0
    assert small.stats().prefix_hit_tokens > 0
    assert small.stats().used_blocks == 0


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("kv_dtype", KV_MODES)
def test_generated_ids_fed_back_as_a_prompt_have_the_same_log_probabilities(
    folder: Path, backend: str, kv_dtype: str
) -> None:
    config = dataclasses.replace(CONFIG, backend=backend, kv_dtype=kv_dtype)
    engine = Engine.open(folder, config)
    prompt = prompts_with_a_common_head()[3]
    [generated] = engine.generate([prompt], GREEDY)
    token_ids = [*prompt, *generated.token_ids]
    expected = logprobs_of([generated])

    scoring = SamplingParams(max_tokens=0, prompt_logprobs=0)
    [scored] = engine.generate([token_ids], scoring)  # computes every position anew
    assert [entry.logprob for entry in scored.prompt_logprobs[len(prompt) - 1 :]] == pytest.approx(
        expected, abs=TOLERANCE[kv_dtype]
    )

    one = dataclasses.replace(GREEDY, max_tokens=1)
    replays = [token_ids[: len(prompt) + i] for i in range(len(expected))]
    hits = engine.stats().prefix_hit_tokens
    assert logprobs_of(one_after_another(engine, replays, one)) == pytest.approx(expected, abs=TOLERANCE[kv_dtype])
    assert engine.stats().prefix_hit_tokens > hits
    fresh = Engine.open(folder, dataclasses.replace(config, prefix_cache=False))
    assert logprobs_of(one_after_another(fresh, replays, one)) == pytest.approx(expected, abs=TOLERANCE[kv_dtype])
