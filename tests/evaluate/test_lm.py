"""The lm-eval adapter: exact log-likelihoods, the boundary of context and continuation, greedy answers."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import DataError
from quantpipe.evaluate.lm import EngineLM
from tests.evaluate.conftest import BOS, BigramEngine, CharCodec, random_table, speaking_table

FLOAT32 = 1e-5  # engines hand out float32 logits; a score here is a sum of a few
GREEDY = {"until": ["\n"], "max_gen_toks": 12}


def asked(kind: str, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def bigram_sum(table_VV: np.ndarray, text: str, start: int) -> float:
    ids = [ord(character) for character in text]
    return float(sum(table_VV[ids[i - 1], ids[i]] for i in range(start, len(ids))))


def test_loglikelihood_is_the_sum_over_the_continuation_only(codec: CharCodec) -> None:
    table_VV = random_table(1)
    lm = EngineLM(BigramEngine(table_VV), codec)
    (score, is_greedy), (other, _) = lm.loglikelihood(
        [asked("loglikelihood", "abc", " de"), asked("loglikelihood", "x", "yz")]
    )
    assert score == pytest.approx(bigram_sum(table_VV, "abc de", start=3), abs=FLOAT32)
    assert other == pytest.approx(bigram_sum(table_VV, "xyz", start=1), abs=FLOAT32)
    assert is_greedy is False


def test_greedy_is_reported_only_where_every_token_is_the_most_likely(codec: CharCodec) -> None:
    lm = EngineLM(BigramEngine(speaking_table("wxyz")), codec)
    scored = lm.loglikelihood([asked("loglikelihood", "w", "xyz"), asked("loglikelihood", "w", "xyw")])
    assert [is_greedy for _, is_greedy in scored] == [True, False]


def test_spaces_at_the_end_of_the_context_belong_to_the_continuation(codec: CharCodec) -> None:
    table_VV = random_table(2)
    [(score, _)] = EngineLM(BigramEngine(table_VV), codec).loglikelihood([asked("loglikelihood", "ab  ", "c")])
    assert score == pytest.approx(bigram_sum(table_VV, "ab  c", start=2), abs=FLOAT32)


def test_empty_context_is_replaced_by_bos_or_else_eos(codec: CharCodec) -> None:
    table_VV = random_table(3)
    [(score, _)] = EngineLM(BigramEngine(table_VV), codec).loglikelihood([asked("loglikelihood", "", "ab")])
    assert score == pytest.approx(table_VV[BOS, ord("a")] + table_VV[ord("a"), ord("b")], abs=FLOAT32)
    codec.bos_token_id = None
    assert EngineLM(BigramEngine(table_VV), codec).prefix_token_id == codec.eos_token_id


def test_a_tokenizer_that_begins_texts_with_bos_gives_exactly_one() -> None:
    class BosCodec(CharCodec):
        def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
            return [BOS] * add_special_tokens + super().encode(text)

    lm = EngineLM(BigramEngine(random_table(0)), BosCodec())
    assert lm.tok_encode("ab") == [BOS, ord("a"), ord("b")]
    assert lm.tok_encode(chr(BOS) + "a") == [BOS, ord("a")]
    assert lm.encode_pair("", "a") == ([BOS], [ord("a")])


@pytest.mark.parametrize("length", [1, 62, 63, 64, 150])
def test_rolling_predicts_every_token_once_whatever_the_length(codec: CharCodec, length: int) -> None:
    """A bigram model needs no more context than each piece has, so the pieces must add up to the whole text."""
    table_VV = random_table(4)
    text = "".join(chr(97 + i % 26) for i in range(length))
    [score] = EngineLM(BigramEngine(table_VV), codec).loglikelihood_rolling([asked("loglikelihood_rolling", text)])
    assert score == pytest.approx(table_VV[BOS, ord("a")] + bigram_sum(table_VV, text, start=1), abs=1e-6)


def test_answers_end_before_the_first_stop_string(codec: CharCodec) -> None:
    engine = BigramEngine(speaking_table("qParis\nx"))
    lm = EngineLM(engine, codec)
    assert lm.generate_until([asked("generate_until", "q", GREEDY)]) == ["Paris"]
    assert lm.generate_until([asked("generate_until", "q", {**GREEDY, "until": ["is"]})]) == ["Par"]
    assert lm.generate_until([asked("generate_until", "q", {**GREEDY, "until": [], "max_gen_toks": 3})]) == ["Par"]


def test_answers_end_at_end_of_sequence(codec: CharCodec) -> None:
    lm = EngineLM(BigramEngine(speaking_table("qRome")), codec)
    assert lm.generate_until([asked("generate_until", "q", GREEDY)]) == ["Rome"]


def test_requests_share_engine_calls_and_progress_counts_each(codec: CharCodec) -> None:
    counted: list[tuple[int, int]] = []

    def progress(items: Iterable[Any], total: int, label: str) -> Iterator[Any]:
        for number, item in enumerate(items, start=1):
            counted.append((number, total))
            yield item

    engine = BigramEngine(random_table(5))
    requests = [asked("loglikelihood", f"{i} ab", chr(97 + i % 26)) for i in range(100)]
    assert len(EngineLM(engine, codec, progress).loglikelihood(requests)) == 100
    assert counted[-1] == (100, 100)
    assert max(engine.calls) >= 32  # a call per request would leave the engine's batch empty


def test_one_choice_of_each_item_is_asked_first_and_scores_keep_their_order(codec: CharCodec) -> None:
    class Remembering(BigramEngine):
        def generate(self, prompts: Any, *rest: Any) -> Any:
            asked_for.extend(codec.decode(prompt) for prompt in prompts)
            return super().generate(prompts, *rest)

    asked_for: list[str] = []
    table_VV = random_table(6)
    pairs = [(f"item {item}:", choice) for item in range(5) for choice in ("a", "bc", "def")]
    scores = EngineLM(Remembering(table_VV), codec).loglikelihood([asked("loglikelihood", *pair) for pair in pairs])
    assert asked_for[:5] == [f"item {item}:b" for item in range(5)]  # "a" is scored where "b" is read
    assert asked_for[5:] == [f"item {item}:de" for item in range(5)]
    expected = [bigram_sum(table_VV, context + text, start=len(context)) for context, text in pairs]
    assert [score for score, _ in scores] == pytest.approx(expected, abs=FLOAT32)


def test_broken_logits_and_oversized_items_are_refused(codec: CharCodec) -> None:
    lm = EngineLM(BigramEngine(np.full((128, 128), np.nan)), codec)
    with pytest.raises(DataError, match="log-likelihood nan"):
        lm.loglikelihood([asked("loglikelihood", "a", "b")])
    lm = EngineLM(BigramEngine(random_table(0)), codec)
    with pytest.raises(DataError, match="exceed max_model_len 64"):
        lm.generate_until([asked("generate_until", "a" * 60, GREEDY)])
    with pytest.raises(DataError, match="a text to score is empty"):
        lm.loglikelihood([asked("loglikelihood", "a", "")])


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"top_k": 5}, "unknown 'top_k'"), ({"do_sample": True}, "sampling"), ({"temperature": 0.7}, "sampling")],
)
def test_generation_that_cannot_be_paired_is_refused(codec: CharCodec, settings: dict[str, Any], message: str) -> None:
    lm = EngineLM(BigramEngine(random_table(0)), codec)
    with pytest.raises(DataError, match=message):
        lm.generate_until([asked("generate_until", "a", {**GREEDY, **settings})])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_choices_share_their_context_and_score_as_if_they_did_not(
    codec: CharCodec, random_llama: Callable[..., Path], backend: str
) -> None:
    pairs = [(f"question {item} " + "x" * 40 + ":", choice) for item in range(6) for choice in ("ab", "bc", "de", "fg")]
    requests = [asked("loglikelihood", *pair) for pair in pairs]
    folder, scores, num_computed = random_llama(), {}, {}
    for is_sharing in (True, False):
        config = EngineConfig(backend=backend, num_threads=1, prefix_cache=is_sharing, block_size=4, max_num_seqs=4)
        engine = Engine.open(folder, config)
        scores[is_sharing] = EngineLM(engine, codec).loglikelihood(requests)
        num_computed[is_sharing] = engine.stats().step_tokens
    assert [score for score, _ in scores[True]] == pytest.approx([score for score, _ in scores[False]], abs=1e-4)
    assert [is_greedy for _, is_greedy in scores[True]] == [is_greedy for _, is_greedy in scores[False]]
    assert num_computed[True] < 0.4 * num_computed[False]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_loglikelihood_on_the_engine_equals_transformers(
    codec: CharCodec, random_llama: Callable[..., Path], backend: str
) -> None:
    from transformers import AutoModelForCausalLM

    folder = random_llama()
    pairs = [("the capital of", " France"), ("", "hello"), ("a b ", "c d e"), ("x", "y" * 40)]
    lm = EngineLM(Engine.open(folder, EngineConfig(backend=backend, num_threads=1)), codec)
    scores = [score for score, _ in lm.loglikelihood([asked("loglikelihood", *pair) for pair in pairs])]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for (context, continuation), score in zip(pairs, scores, strict=True):
        context_ids, ids = lm.encode_pair(context, continuation)
        with torch.no_grad():
            logits_TV = model(torch.tensor([context_ids + ids])).logits[0, len(context_ids) - 1 : -1]
        expected = torch.log_softmax(logits_TV.double(), -1)[range(len(ids)), ids].sum()
        assert score == pytest.approx(float(expected), abs=1e-3)  # sums of up to 40 float32 log-probabilities


def test_the_numbers_of_all_three_request_kinds_are_those_of_lm_evals_own_hugging_face_model(tiny_llama: Path) -> None:
    """In float32 to 1e-4: a log-likelihood is a sum of up to some dozen float32 log-probabilities."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    other = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(tiny_llama), device="cpu", batch_size=2)
    config = EngineConfig(backend="reference", num_threads=1, max_num_seqs=8)
    ours = EngineLM(Engine.open(tiny_llama, config), Tokenizer.open(tiny_llama))
    contexts, texts = ("def f(", "import json\n", ""), ("self):", " return x", "a")
    pairs = [(context, text) for context in contexts for text in texts]
    choices = [asked("loglikelihood", *pair) for pair in pairs]
    found, expected = ours.loglikelihood(choices), other.loglikelihood(choices, disable_tqdm=True)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-4)
    assert [is_greedy for _, is_greedy in found] == [bool(is_greedy) for _, is_greedy in expected]
    whole = [asked("loglikelihood_rolling", text) for text in ("for key in table:\n    print(key)\n", "x")]
    rolling = other.loglikelihood_rolling(whole, disable_tqdm=True)
    assert ours.loglikelihood_rolling(whole) == pytest.approx(rolling, abs=1e-4)
    prompts = [asked("generate_until", text, GREEDY) for text in ("def f(self", "class A:\n    def ", "import ")]
    assert ours.generate_until(prompts) == other.generate_until(prompts, disable_tqdm=True)


def test_what_many_prompts_begin_with_is_read_once_before_them(
    codec: CharCodec, random_llama: Callable[..., Path]
) -> None:
    """Prompts that begin together are batched together, and would each compute what none of them has computed yet."""
    examples = "Q: what? A: this. " * 4
    requests = [asked("generate_until", f"{examples}Q: {chr(65 + i)}", {"max_gen_toks": 2}) for i in range(8)]
    config = EngineConfig(backend="reference", num_threads=1, block_size=4, max_num_seqs=8)
    folder = random_llama()
    engine = Engine.open(folder, config)
    answers = EngineLM(engine, codec).generate_until(requests)
    assert engine.stats().step_tokens < 2 * len(examples) + 8 * 16
    alone = [EngineLM(Engine.open(folder, config), codec).generate_until([request])[0] for request in requests[:2]]
    assert answers[:2] == alone
