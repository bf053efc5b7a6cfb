"""The engine over Triton's kernels chooses the tokens that it chooses over the reference."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import SamplingParams

# A prompt is read in chunks beside decodes, and forks copy a block.
CONFIG = EngineConfig(block_size=4, num_kv_blocks=16, max_model_len=24, max_num_seqs=4, max_num_batched_tokens=8)
PROMPTS = [[*range(20, 31)], [5, 90, 7]]
GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)
FORKED = SamplingParams(n=2, max_tokens=4, temperature=0.7, seed=11, ignore_eos=True)


def tokens(folder: Path, backend: str, kv_dtype: str) -> tuple[list[list[tuple[int, ...]]], int]:
    """Of each prompt, its samples; and how many blocks were copied for them."""
    engine = Engine.open(folder, dataclasses.replace(CONFIG, backend=backend, kv_dtype=kv_dtype))
    outputs = [*engine.generate(PROMPTS, GREEDY), *engine.generate(PROMPTS[:1], FORKED)]
    return [[sample.token_ids for sample in output.samples] for output in outputs], engine.stats().copied_blocks


@pytest.mark.parametrize("kv_dtype", ["auto", "int8_per_token_head", "int8_static", "int4_per_token_head"])
def test_chunks_decodes_and_forks_give_the_tokens_of_the_reference(
    kv_dtype: str, random_llama: Callable[..., Path], add_kv_scales: Callable[[Path], Path]
) -> None:
    folder = add_kv_scales(random_llama(tie_word_embeddings=False))
    expected, found = (tokens(folder, backend, kv_dtype) for backend in ("reference", "triton"))
    assert found == expected
    assert found[1] == 1


def test_trained_model_gives_the_tokens_of_the_reference(tiny_llama: Path) -> None:
    expected, found = (
        Engine.open(tiny_llama, dataclasses.replace(CONFIG, backend=backend)).generate(PROMPTS[:1], GREEDY)[0].token_ids
        for backend in ("reference", "triton")
    )
    assert found == expected
