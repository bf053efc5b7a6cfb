"""Offline generation: the texts are those of the engine, the tokenizer and the stop strings, and of nothing else."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import quantpipe
from quantpipe import LLM, Grammar, SamplingParams
from quantpipe.engine.request import FinishReason
from quantpipe.errors import ArtifactError, QuantpipeError, RecipeError, RequestError

PARAMS = SamplingParams(max_tokens=12)
MESSAGES = [{"role": "user", "content": "The file is"}]


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> LLM:
    return LLM(str(tiny_llama), num_threads=1, max_num_seqs=4, max_model_len=128)


def test_package_gives_its_names_without_loading_torch_for_the_others() -> None:
    code = (
        "import sys, quantpipe; assert 'torch' not in sys.modules; from quantpipe import LLM, SamplingParams; "
        "assert LLM.__module__ == 'quantpipe.llm'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert all(hasattr(quantpipe, name) for name in quantpipe.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = quantpipe.Engine


def test_each_prompt_gets_its_own_text_in_order(llm: LLM) -> None:
    prompts = ["The file", "import", "A list of", "The file"]
    together = llm.generate(prompts, PARAMS)
    assert [completion.prompt for completion in together] == prompts
    for prompt, completion in zip(prompts, together, strict=True):
        [alone] = llm.generate(prompt, PARAMS)
        assert alone == completion
        [output] = completion.outputs
        assert completion.text == output.text == llm.tokenizer.decode(output.token_ids)
        assert completion.prompt_token_ids == tuple(llm.tokenizer.encode(prompt, add_special_tokens=True))
        assert (output.finish_reason, len(output.token_ids)) == (FinishReason.LENGTH, 12)


def test_token_ids_are_prompts_too_one_or_many(llm: LLM) -> None:
    ids: Sequence[int] = llm.tokenizer.encode("The file", add_special_tokens=True)
    [from_text] = llm.generate("The file", PARAMS)
    [from_ids] = llm.generate(ids, PARAMS)
    assert (from_ids.prompt, from_ids.outputs) == (None, from_text.outputs)
    both: list[str | Sequence[int]] = [ids, "The file"]
    assert [completion.outputs for completion in llm.generate(both, PARAMS)] == [from_text.outputs] * 2
    assert llm.generate([], PARAMS) == []


def test_samples_differ_and_the_same_seed_repeats_them(llm: LLM) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, n=4, seed=3, logprobs=1)
    [first] = llm.generate("The file", params)
    [again] = llm.generate("The file", params)
    assert first == again
    assert [output.index for output in first.outputs] == [0, 1, 2, 3]
    assert len({output.token_ids for output in first.outputs}) == 4
    for output in first.outputs:
        assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
    [single] = llm.generate("The file", SamplingParams(max_tokens=16, temperature=1.0, seed=3))
    assert single.text == first.text


@pytest.mark.parametrize("as_list", [True, False])
def test_stop_string_ends_the_text_before_it_whatever_tokens_it_is_cut_into(llm: LLM, as_list: bool) -> None:
    [whole] = llm.generate("The file", SamplingParams(max_tokens=30))
    for start in range(3, len(whole.text) - 4, 5):
        stop = whole.text[start : start + 4]
        [completion] = llm.generate("The file", SamplingParams(max_tokens=30, stop=[stop] if as_list else stop))
        [output] = completion.outputs
        assert output.text == whole.text[: whole.text.index(stop)]
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
        assert stop in llm.tokenizer.decode(output.token_ids)
        assert output.token_ids == whole.outputs[0].token_ids[: len(output.token_ids)]
    assert llm.stats().used_blocks == 0


def test_stop_string_of_one_sample_lets_the_others_go_on(llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0, n=4, seed=5)
    [free] = llm.generate("The file", params)
    stop = free.outputs[2].text[6:10]
    [stopped] = llm.generate("The file", SamplingParams(max_tokens=24, temperature=1.0, n=4, seed=5, stop=(stop,)))
    for before, after in zip(free.outputs, stopped.outputs, strict=True):
        if stop in before.text:
            assert after.text == before.text[: before.text.index(stop)]
            assert after.stop_reason == stop
        else:
            assert after == before
    assert stopped.outputs[2].stop_reason == stop


def test_stop_token_is_counted_named_and_no_text(llm: LLM) -> None:
    [free] = llm.generate("The file", PARAMS)
    stop = free.outputs[0].token_ids[5]
    [completion] = llm.generate("The file", SamplingParams(max_tokens=12, stop_token_ids=(stop,)))
    [output] = completion.outputs
    assert (output.finish_reason, output.stop_reason, output.token_ids[-1]) == (FinishReason.STOP, stop, stop)
    assert output.text == llm.tokenizer.decode(output.token_ids[:-1])


def test_chat_answers_one_conversation_or_many_through_the_template(llm: LLM) -> None:
    [one] = llm.chat(MESSAGES, PARAMS)
    assert one.prompt is not None and "The file is" in one.prompt
    assert one.prompt_token_ids == tuple(llm.tokenizer.encode(one.prompt))
    assert llm.chat([MESSAGES, MESSAGES], PARAMS) == [one, one]


def test_parameters_may_be_given_per_prompt(llm: LLM) -> None:
    completions = llm.generate(["The", "A", "If"], [SamplingParams(max_tokens=n) for n in (3, 5, 7)])
    assert [len(completion.outputs[0].token_ids) for completion in completions] == [3, 5, 7]
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    [completion] = llm.generate("The file", scored)
    assert [entry.token_id for entry in completion.prompt_logprobs] == list(completion.prompt_token_ids[1:])


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["a", ""], SamplingParams(n=5), r"^sampling_params: n: 5 samples exceed max_num_seqs 4.* raise max_num_seqs$"),
        (["a"], SamplingParams(temperature=-1), r"^sampling_params: temperature: -1 is not a finite number"),
        (["a", "b"], [PARAMS, SamplingParams(top_p=2)], r"^sampling_params\[1\]: top_p: 2 is outside"),
        (["a"], SamplingParams(logit_bias={99_999: 1}), r"^sampling_params: logit_bias: token id 99999 is outside"),
        (["a", [99_999]], PARAMS, r"prompts\[1\]: prompt: token id 99999 is outside the vocabulary"),
        (["a", "b"], [PARAMS], "sampling_params: 1 for 2 prompts; give one for all or one for each"),
        (["a"], {"temperature": 1}, r"sampling_params: found {'temperature': 1}; give a quantpipe.SamplingParams"),
        (["a", "b"], [PARAMS, 5], "sampling_params: found 5; give a quantpipe.SamplingParams"),
        (["a"], SamplingParams(stop=""), None),
        (["a"], SamplingParams(stop=["x", ""]), r"^sampling_params: stop: '' is not a text"),
        ([[1], 2], PARAMS, "prompts: token ids and whole prompts in one list"),
        (None, PARAMS, "prompts: None is neither a text"),
        (5, PARAMS, "prompts: 5 is neither a text"),
        ([True, False], PARAMS, r"prompts\[0\]: prompt: True and False are no token ids"),
        (["a", "\ud800"], PARAMS, r"prompts\[1\]: prompt: not valid Unicode"),
        ([[1, 2.5]], PARAMS, r"prompts\[0\]: prompt: not a list of token ids"),
        (["a"], SamplingParams(max_tokens=128), r"prompts\[0\]: max_tokens: 128 after a prompt of"),
    ],
)
def test_bad_request_is_refused_before_anything_runs_and_the_next_one_works(
    llm: LLM, prompts: Any, params: Any, message: str | None
) -> None:
    num_steps = llm.stats().steps
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)
    assert llm.stats().steps == num_steps
    assert len(llm.generate("The file", PARAMS)[0].outputs[0].token_ids) == 12


def test_an_interrupt_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> tuple[int, int]:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["The file"] * 6, PARAMS)
    monkeypatch.undo()
    assert (llm.stats().num_running, llm.stats().num_waiting, llm.stats().used_blocks) == (0, 0, 0)
    assert len(llm.generate("The file", PARAMS)[0].outputs[0].token_ids) == 12


def test_unknown_setting_or_folder_is_refused_with_what_there_is(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"^max_num_seq: unknown setting; did you mean 'max_num_seqs'\?"):
        LLM(tiny_llama, max_num_seq=3)
    with pytest.raises(RecipeError, match=r"^max_num_seqs: '3' is no whole number"):
        LLM(tiny_llama, max_num_seqs="3")
    with pytest.raises(RecipeError, match=r"^kv_cache: unknown setting; did you mean 'kv_dtype'\?"):
        LLM(tiny_llama, kv_cache="int8_static")
    with pytest.raises(RecipeError, match=r"^max_model_len: 9,999,999 exceeds the model's own limit"):
        LLM(tiny_llama, max_model_len=9_999_999)
    with pytest.raises(ArtifactError):
        LLM(tmp_path)
    assert issubclass(RecipeError, QuantpipeError)


def test_progress_goes_to_a_terminal_only(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate("The file", PARAMS)
    assert capfd.readouterr() == ("", "")


def test_text_obeys_its_grammar(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=40, temperature=1.0, seed=1, grammar=Grammar("regex", "(ab|ba){4}"))
    [completion] = llm.generate("The file", params)
    assert all(re.fullmatch("(ab|ba){4}", output.text) for output in completion.outputs)
    with pytest.raises(RequestError, match=r"^sampling_params: grammar: .*unclosed group"):
        llm.generate("The file", SamplingParams(grammar=Grammar("regex", "((")))
