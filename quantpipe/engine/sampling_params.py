"""How a request wants its tokens chosen, and which values of it can be served. Knows no logits and no sequence."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quantpipe.engine.constraint import Grammar, check_grammar
from quantpipe.errors import RequestError, suggest

MAX_LOGPROBS = 20
MAX_PENALTY = 2.0  # of presence and frequency, either way
MAX_BIAS = 100.0  # either way: enough to force or to ban a token


@dataclass(frozen=True)
class SamplingParams:
    """How new tokens are chosen. Names and meanings are vLLM's.

    ``n`` samples are made of one prompt, which is read once; each has draws of its own, the first those of a request
    for one. ``max_tokens`` 0 only reads the prompt (for scoring). ``min_tokens``: until that many tokens are there,
    neither an end-of-sequence token nor one of ``stop_token_ids`` is chosen. ``seed`` makes a request's draws
    independent of what else is in the batch.

    The logits are changed in this order: ``min_tokens``; ``logit_bias`` (token id -> what is added);
    ``repetition_penalty`` (divides positive logits of every token of the prompt and the output, multiplies negative
    ones; 1 is off); ``frequency_penalty`` (subtracted once per time a token was generated) and ``presence_penalty``
    (subtracted where it was generated at all). Then ``temperature`` (0 is greedy, and ends here), ``min_p`` (keeps what
    is at least that share as likely as the likeliest token; 0 is off), ``top_k`` (0 is off) and ``top_p`` (1 is off).

    ``stop`` strings end the text before the first of them; they are for ``quantpipe.LLM``, as an engine knows no text.

    ``grammar`` says what the text must look like; it is obeyed before all of these, and ends with an end-of-sequence
    token. Where it has nothing to say but that, ``min_tokens`` does not hold it back.

    ``logprobs`` n returns the n most likely alternatives and the chosen token's log-probability, all before any of
    these changes. ``prompt_logprobs`` n returns the same of each prompt token after the first, or from position
    ``prompt_logprobs_from`` on: what comes before it is not scored, and may be found in the prefix cache.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    stop: str | Sequence[str] = field(default=(), hash=False)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 1

    def __new__(cls, *_values: Any, **settings: Any) -> "SamplingParams":
        """Raise RequestError for a parameter that is not there, which a dataclass itself calls a TypeError."""
        for name in settings:
            if name not in cls.__dataclass_fields__:
                raise RequestError(f"{name}: unknown sampling parameter{suggest(name, cls.__dataclass_fields__)}", name)
        return super().__new__(cls)


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError, naming the parameter, for a value that is no number, out of range or out of vocabulary."""
    _check_counts(params)
    if not _is_number(params.temperature, 0, sys.float_info.max):
        raise RequestError(f"temperature: {params.temperature!r} is not a finite number of at least 0", "temperature")
    if not (_is_number(params.top_p, 0, 1) and params.top_p > 0):
        raise RequestError(f"top_p: {params.top_p!r} is outside (0, 1]", "top_p")
    if not _is_number(params.min_p, 0, 1):
        raise RequestError(f"min_p: {params.min_p!r} is outside [0, 1] (0 switches it off)", "min_p")
    _check_penalties(params)
    _check_bias(params, vocab_size)
    if params.stop:
        raise RequestError("stop: an engine knows no text; use quantpipe.LLM, or stop_token_ids", "stop")
    for token_id in params.stop_token_ids:
        check_token_id(token_id, vocab_size, "stop_token_ids")
    if params.grammar is not None:
        check_grammar(params.grammar)
        if params.ignore_eos:
            raise RequestError("ignore_eos: a grammar ends with an end-of-sequence token; leave one out", "ignore_eos")


def check_token_id(token_id: object, vocab_size: int, param: str) -> None:
    """RequestError where ``token_id`` is no token of the model's."""
    if not _is_integer(token_id):
        raise RequestError(f"{param}: {token_id!r} is not a token id", param)
    if not _is_number(token_id, 0, vocab_size - 1):
        raise RequestError(f"{param}: token id {token_id} is outside the vocabulary 0..{vocab_size - 1}", param)


def _check_counts(params: SamplingParams) -> None:
    for name, value in (("max_tokens", params.max_tokens), ("min_tokens", params.min_tokens), ("top_k", params.top_k)):
        if not (_is_integer(value) and value >= 0):
            hint = " (0 switches it off)" if name != "max_tokens" else ""
            raise RequestError(f"{name}: {value!r} is not a whole number of at least 0{hint}", name)
    if not (_is_integer(params.n) and params.n >= 1):
        raise RequestError(f"n: {params.n!r} is not a whole number of at least 1", "n")
    if params.n > 1 and params.max_tokens == 0:
        raise RequestError(f"n: {params.n} samples of max_tokens 0 would all be empty; ask for one", "n")
    if params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens: {params.min_tokens:,} exceeds max_tokens {params.max_tokens:,}; lower it", "min_tokens"
        )
    for name, num in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if num is not None and not (_is_integer(num) and 0 <= num <= MAX_LOGPROBS):
            raise RequestError(f"{name}: {num!r} is outside 0..{MAX_LOGPROBS}", name)
    if not (_is_integer(params.prompt_logprobs_from) and params.prompt_logprobs_from >= 1):
        raise RequestError(
            f"prompt_logprobs_from: {params.prompt_logprobs_from!r} is not a whole number of at least 1; nothing "
            "predicts the first token, which is at 0",
            "prompt_logprobs_from",
        )
    if params.seed is not None and not _is_integer(params.seed):
        raise RequestError(f"seed: {params.seed!r} is not a whole number", "seed")


def _check_penalties(params: SamplingParams) -> None:
    penalty = params.repetition_penalty
    if not (_is_number(penalty, 0, sys.float_info.max) and penalty > 0):
        raise RequestError(
            f"repetition_penalty: {penalty!r} is not a finite number above 0 (1 switches it off)", "repetition_penalty"
        )
    for name, value in (
        ("presence_penalty", params.presence_penalty),
        ("frequency_penalty", params.frequency_penalty),
    ):
        if not _is_number(value, -MAX_PENALTY, MAX_PENALTY):
            raise RequestError(f"{name}: {value!r} is outside [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]", name)


def _check_bias(params: SamplingParams, vocab_size: int) -> None:
    if not isinstance(params.logit_bias, Mapping):
        raise RequestError(f"logit_bias: {params.logit_bias!r} is not a mapping of token ids to numbers", "logit_bias")
    for token_id, bias in params.logit_bias.items():
        check_token_id(token_id, vocab_size, "logit_bias")
        if not _is_number(bias, -MAX_BIAS, MAX_BIAS):
            raise RequestError(
                f"logit_bias: {bias!r} for token {token_id} is outside [-{MAX_BIAS:g}, {MAX_BIAS:g}]", "logit_bias"
            )


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: object, low: float, high: float) -> bool:
    """Whether ``value`` lies in [low, high]; NaN, which compares false with everything, does not."""
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        return False
    return bool(low <= value <= high)
