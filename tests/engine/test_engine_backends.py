"""The engine on real backends and model folders: transformers is the oracle for float32 greedy tokens and logits."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from quantpipe.backends import BACKENDS
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import FinishReason, RequestOutput, SamplingParams
from quantpipe.errors import ArtifactError, RecipeError
from quantpipe.formats.kv_mode import KV_MODES

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def roomy(backend: str = "cpu", kv_dtype: str | None = None) -> EngineConfig:
    """One sequence at a time, whole prompts."""
    return EngineConfig(backend=backend, kv_dtype=kv_dtype, max_num_seqs=1)


def cramped(backend: str = "cpu", kv_dtype: str | None = None) -> EngineConfig:
    """Small blocks, chunks and pool: prompts are read in pieces, sequences are preempted and resumed."""
    return EngineConfig(
        backend=backend,
        kv_dtype=kv_dtype,
        block_size=4,
        num_kv_blocks=18,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        admission="greedy",
    )


def random_prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in (1, 4, 8, 19, 33)]


@torch.inference_mode()
def assert_greedy(model: LlamaForCausalLM, output: RequestOutput) -> None:
    """Each token is the most likely one after those before it: what transformers generates, in one pass."""
    logits_TV = model(torch.tensor([output.prompt_ids + output.token_ids])).logits[0]
    best = logits_TV.argmax(-1)[len(output.prompt_ids) - 1 : -1]
    assert output.token_ids == tuple(best.tolist())


@pytest.fixture(scope="module")
def folder(random_llama: Callable[..., Path], add_kv_scales: Callable[[Path], Path]) -> Path:
    return add_kv_scales(random_llama(tie_word_embeddings=False))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_greedy_tokens_equal_those_of_transformers(folder: Path, oracle: LlamaForCausalLM, backend: str) -> None:
    engine = Engine.open(folder, cramped(backend))
    outputs = engine.generate(random_prompts(128), GREEDY)
    for output in outputs:
        assert len(output.token_ids) == 12
        assert_greedy(oracle, output)
    assert engine.stats().num_preemptions > 0
    assert engine.stats().used_blocks == 0


def test_short_generation_equals_transformers_generate(folder: Path, oracle: LlamaForCausalLM) -> None:
    prompt = random_prompts(128)[2]
    [output] = Engine.open(folder).generate([prompt], GREEDY)
    settings = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    generated = oracle.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **settings)
    assert output.token_ids == tuple(generated[0, len(prompt) :].tolist())


def test_greedy_tokens_of_the_trained_model_equal_those_of_transformers(tiny_llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    for output in Engine.open(tiny_llama, cramped()).generate(random_prompts(4096), GREEDY):
        assert_greedy(model, output)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@torch.inference_mode()
def test_prompt_logits_in_chunks_equal_those_of_transformers(
    folder: Path, oracle: LlamaForCausalLM, backend: str
) -> None:
    prompt = random_prompts(128)[-1]
    rows: list[npt.NDArray[np.float32]] = []
    engine = Engine.open(folder, cramped(backend))
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    [output] = engine.generate([prompt], params, [lambda first, logits: rows.append(logits.copy())])
    assert [len(row) for row in rows] == [12, 12, 9]
    expected_TV = oracle(torch.tensor([prompt])).logits[0]
    # float32 sums of 128 terms in another order
    torch.testing.assert_close(torch.from_numpy(np.concatenate(rows)), expected_TV, atol=2e-4, rtol=1e-4)
    expected = expected_TV.log_softmax(-1)[:-1].gather(-1, torch.tensor(prompt[1:]).unsqueeze(-1)).squeeze(-1)
    assert [entry.logprob for entry in output.prompt_logprobs] == pytest.approx(expected.tolist(), abs=2e-4)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("kv_dtype", KV_MODES)
def test_tokens_do_not_depend_on_chunks_batch_or_preemption(folder: Path, backend: str, kv_dtype: str) -> None:
    prompts = random_prompts(128)
    expected, found = (
        [output.token_ids for output in Engine.open(folder, config).generate(prompts, GREEDY)]
        for config in (roomy(backend, kv_dtype), cramped(backend, kv_dtype))
    )
    assert found == expected


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("kv_dtype", KV_MODES)
def test_overflow_in_one_request_harms_neither_its_neighbours_nor_those_after_it(
    random_llama: Callable[..., Path], add_kv_scales: Callable[[Path], Path], backend: str, kv_dtype: str
) -> None:
    folder = add_kv_scales(random_llama(tie_word_embeddings=False))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][100] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    prompts = [prompt for prompt in random_prompts(100) if 100 not in prompt]
    engine = Engine.open(folder, cramped(backend, kv_dtype))
    safe = SamplingParams(max_tokens=6, ignore_eos=True)
    expected = [output.token_ids for output in engine.generate(prompts, safe)]
    assert not any(100 in token_ids for token_ids in expected)
    bad, *others = engine.generate([[5, 100, 7], *prompts], safe)
    assert bad.finish_reason is FinishReason.ABORT
    assert bad.error is not None
    assert [output.token_ids for output in others] == expected
    assert [output.token_ids for output in engine.generate(prompts, safe)] == expected


def test_models_own_end_token_stops_the_request(random_llama: Callable[..., Path], folder: Path) -> None:
    prompt = random_prompts(128)[2]
    unstopped = Engine.open(folder).generate([prompt], GREEDY)[0].token_ids
    stop = unstopped[4]
    stopping = random_llama(tie_word_embeddings=False, eos_token_id=stop)
    [output] = Engine.open(stopping).generate([prompt], SamplingParams(max_tokens=12))
    assert output.finish_reason is FinishReason.STOP
    assert output.token_ids == unstopped[: unstopped.index(stop) + 1]


def test_model_limit_and_kv_dtype_are_taken_from_the_folder(folder: Path) -> None:
    engine = Engine.open(folder)
    assert engine.max_model_len == 256
    assert engine.kv_dtype == "auto"


def test_unknown_kv_dtype_is_refused_wherever_it_comes_from(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"engine.kv_dtype: unknown 'int8'.*\(known: auto, "):
        EngineConfig(kv_dtype="int8")
    copied = tmp_path / "model"
    shutil.copytree(folder, copied)
    (copied / "quantpipe.json").write_text('{"kv_cache": "int9"}', encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"quantpipe\.json: kv_cache: unknown 'int9'"):
        Engine.open(copied)


def test_unknown_backend_is_refused_with_the_known_ones(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"engine.backend: unknown 'cppu'; did you mean 'cpu'\?"):
        Engine.open(folder, EngineConfig(backend="cppu"))


def test_empty_folder_is_an_artifact_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError):
        Engine.open(tmp_path)
