"""A model whose probabilities are known exactly, and a tokenizer with one token per character."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from quantpipe.engine.request import FinishReason, PromptLogitsSink, RequestOutput, SamplingParams, TokenLogprob

VOCAB_SIZE = 128
BOS, EOS = 1, 2


class CharCodec:
    """ASCII text; a token is a character."""

    vocab_size = VOCAB_SIZE
    bos_token_id: int | None = BOS
    eos_token_id: int | None = EOS

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(i) for i in ids if not (skip_special_tokens and i in (BOS, EOS)))


class BigramEngine:
    """Predicts from the last token only, by a table of log-probabilities [V, V]. Remembers the prompts it was given."""

    max_model_len = 64

    def __init__(self, table_VV: np.ndarray, rows_per_chunk: int = 1000) -> None:
        self.table_VV = table_VV
        self.rows_per_chunk = rows_per_chunk
        self.calls: list[int] = []

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        prompt_logits_sinks: Sequence[PromptLogitsSink] | None = None,
    ) -> list[RequestOutput]:
        self.calls.append(len(prompts))
        params_of = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        for prompt, sink in zip(prompts, prompt_logits_sinks or (), strict=False):
            for first in range(0, len(prompt), self.rows_per_chunk):
                chunk = list(prompt[first : first + self.rows_per_chunk])
                sink(first, self.table_VV[chunk].astype(np.float32))
        return [self._finish(tuple(prompt), each) for prompt, each in zip(prompts, params_of, strict=True)]

    def _finish(self, prompt: tuple[int, ...], params: SamplingParams) -> RequestOutput:
        new: list[int] = []
        while len(new) < params.max_tokens:
            new.append(int(self.table_VV[(prompt + tuple(new))[-1]].argmax()))
            if new[-1] == EOS or new[-1] in params.stop_token_ids:
                break
        logprobs = tuple(
            TokenLogprob(token, float(self.table_VV[previous, token]), bool(self.table_VV[previous].argmax() == token))
            for previous, token in itertools.pairwise(prompt)
        )
        asked = logprobs[params.prompt_logprobs_from - 1 :] if params.prompt_logprobs is not None else ()
        return RequestOutput("r", prompt, tuple(new), FinishReason.LENGTH, (), asked)


def random_table(seed: int) -> np.ndarray:
    logits_VV = np.random.default_rng(seed).normal(size=(VOCAB_SIZE, VOCAB_SIZE)) * 2
    return logits_VV - np.log(np.exp(logits_VV).sum(-1, keepdims=True))


def speaking_table(text: str) -> np.ndarray:
    """A table whose greedy continuation of the first character of ``text`` is the rest of it, then EOS."""
    table_VV = random_table(0)
    for previous, following in zip(text, [*map(ord, text[1:]), EOS], strict=True):
        table_VV[ord(previous), following] = 0.0
    return table_VV


@pytest.fixture
def codec() -> CharCodec:
    return CharCodec()
