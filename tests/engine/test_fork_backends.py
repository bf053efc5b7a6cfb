"""Forks on real backends: in every KV mode a sample continues as a separate request does."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from quantpipe.backends import BACKENDS
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.draws import sample_seed
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import SamplingParams
from quantpipe.formats.kv_mode import KV_MODES

CONFIG = EngineConfig(block_size=4, max_model_len=48, max_num_seqs=4, max_num_batched_tokens=12, num_kv_blocks=40)
PROMPT = [*range(20, 34)]  # three blocks and a half
# Cool enough that rounding in another order moves no draw across a border.
PARAMS = SamplingParams(n=4, max_tokens=14, temperature=0.7, seed=11, ignore_eos=True, logprobs=0)
# Float32 sums in another order, and where keys and values are quantized, one that then rounds the other way.
TOLERANCE = {kv_dtype: 1e-4 if kv_dtype == "auto" else 2e-2 for kv_dtype in KV_MODES}


@pytest.fixture(scope="module")
def folder(random_llama: Callable[..., Path], add_kv_scales: Callable[[Path], Path]) -> Path:
    return add_kv_scales(random_llama(tie_word_embeddings=False))


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("kv_dtype", KV_MODES)
def test_fork_continues_as_a_separate_request(folder: Path, backend: str, kv_dtype: str) -> None:
    config = dataclasses.replace(CONFIG, backend=backend, kv_dtype=kv_dtype, prefix_cache=False)
    engine = Engine.open(folder, config)
    [output] = engine.generate([PROMPT], PARAMS)
    assert engine.stats().copied_blocks == 3
    assert len({sample.token_ids for sample in output.samples}) > 1
    for sample in output.samples:
        own = dataclasses.replace(PARAMS, n=1, seed=sample_seed(11, sample.index))
        [alone] = engine.generate([PROMPT], own)
        assert sample.token_ids == alone.token_ids
        logprobs, expected = ([entry.logprob for entry in entries] for entries in (sample.logprobs, alone.logprobs))
        assert logprobs == pytest.approx(expected, abs=TOLERANCE[kv_dtype])
    assert engine.stats().copied_blocks == 3


def test_torch_backend_reports_how_much_of_what_attention_reads_is_padding(folder: Path) -> None:
    engine = Engine.open(folder, dataclasses.replace(CONFIG, backend="torch"))
    engine.generate([PROMPT], dataclasses.replace(PARAMS, n=1))
    assert engine.stats().padding_efficiency_frac == 1
    engine.generate([PROMPT, PROMPT[:3]], dataclasses.replace(PARAMS, n=1))
    stats = engine.stats()
    assert 0.5 < stats.padding_efficiency_frac < 1
    assert stats.padded_context_tokens > stats.context_tokens > 0
