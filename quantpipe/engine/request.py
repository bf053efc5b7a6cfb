"""What a caller asks of the engine and what comes back. Requests are frozen; ``Sequence`` is their mutable progress."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

from quantpipe.engine.prefix_cache import PrefixNamespace
from quantpipe.errors import RequestError

# Called with the index of the first prompt position of a chunk and its float32 logits [rows, vocab]:
# row i are the logits *after* reading prompt_ids[first + i], i.e. they predict position first + i + 1.
# Chunks arrive in order and cover each prompt position once. The array is valid during the call only: copy to keep.
PromptLogitsSink = Callable[[int, npt.NDArray[np.float32]], None]

QosClass = Literal["interactive", "standard", "batch"]

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How new tokens are chosen. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 switch those filters off.

    ``max_tokens`` 0 only reads the prompt (for scoring). ``seed`` makes a request's draws independent of what else
    is in the batch. ``logprobs`` n returns the n most likely alternatives and the chosen token's log-probability,
    all before temperature and filters. ``prompt_logprobs`` returns the same of each prompt token after the first.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its natural-log probability, and whether it is the most likely one."""

    token_id: int
    logprob: float
    is_greedy: bool
    top: tuple[tuple[int, float], ...] = ()


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Prompts share what was computed of a common prefix only under the same ``cache_salt``: a secret of each tenant.
    Who runs first is up to the engine's policy: ``priority`` (lower first), ``qos`` and ``deadline_s`` (seconds from
    ``arrival_s``, which is a time of the engine's clock, to the last token).
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    prompt_logits_sink: PromptLogitsSink | None = None
    cache_salt: str = ""
    priority: int = 0
    qos: QosClass = "standard"
    deadline_s: float | None = None
    arrival_s: float = 0.0

    @property
    def is_scored(self) -> bool:
        """Whether the logits of every prompt position are wanted, not only those of the last."""
        return self.params.prompt_logprobs or self.prompt_logits_sink is not None


@dataclass(frozen=True)
class StepOutput:
    """What one engine step produced for one request: usually one token; on the last, the reason it ended.

    ``error`` says in one line why a request that nobody aborted ended with ``ABORT``.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    error: str | None = None

    @property
    def text_token_ids(self) -> tuple[int, ...]:
        """``token_ids`` without the token that stopped the request: what to show as text."""
        return self.token_ids[:-1] if self.finish_reason is FinishReason.STOP else self.token_ids


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. ``prompt_logprobs`` has one entry per prompt token after the first, if asked for.

    A request that ends with ``STOP`` has the token that stopped it as the last of ``token_ids`` (as in vLLM), so
    that counts and log-probabilities cover every token computed; ``text_token_ids`` leaves it out.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None

    @property
    def text_token_ids(self) -> tuple[int, ...]:
        """``token_ids`` without the token that stopped the request: what to show as text."""
        return self.token_ids[:-1] if self.finish_reason is FinishReason.STOP else self.token_ids


@dataclass(eq=False)
class Sequence:
    """A request's progress: its prompt and what was generated after it.

    ``num_computed_tokens`` counts tokens whose keys and values are in the cache: zero again after preemption.
    ``num_seen_tokens`` is the most it ever was: what was delivered for positions below it is not delivered again.
    ``seed`` is the request's own, or one drawn for it. ``namespace`` is where its blocks may be shared.
    ``index`` is which of the request's samples it is; ``num_pending_forks`` others will start where its prompt ends.
    """

    request: Request
    token_ids: list[int]
    seed: int = 0
    namespace: PrefixNamespace = field(default_factory=PrefixNamespace)
    index: int = 0
    num_pending_forks: int = 0
    num_computed_tokens: int = 0
    num_seen_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens still to be read before the next one can be chosen: 1 for a sequence that is decoding."""
        return len(self.token_ids) - self.num_computed_tokens


def check_request(request: Request, vocab_size: int, max_model_len: int) -> None:
    """Raise RequestError, naming the parameter as an HTTP caller knows it, for what can never be served."""
    _check_params(request.params, vocab_size)
    prompt_ids, max_tokens = request.prompt_ids, request.params.max_tokens
    if not prompt_ids:
        raise RequestError("prompt: empty; give at least one token", "prompt")
    for token_id in (min(prompt_ids), max(prompt_ids)):
        _check_token_id(token_id, vocab_size, "prompt")
    if len(prompt_ids) + min(max_tokens, 1) > max_model_len:
        raise RequestError(
            f"prompt: {len(prompt_ids):,} tokens do not fit in max_model_len {max_model_len:,} with one new token; "
            "shorten it or raise engine.max_model_len",
            "prompt",
        )
    if len(prompt_ids) + max_tokens > max_model_len:
        raise RequestError(
            f"max_tokens: {max_tokens:,} after a prompt of {len(prompt_ids):,} tokens exceed max_model_len "
            f"{max_model_len:,}; ask for at most {max_model_len - len(prompt_ids):,}",
            "max_tokens",
        )


def _check_params(params: SamplingParams, vocab_size: int) -> None:
    # Written so that NaN, which compares false with everything, is refused.
    if not (params.temperature >= 0 and math.isfinite(params.temperature)):
        raise RequestError(f"temperature: {params.temperature} is not a finite number of at least 0", "temperature")
    if not 0 < params.top_p <= 1:
        raise RequestError(f"top_p: {params.top_p} is outside (0, 1]", "top_p")
    if params.top_k < 0:
        raise RequestError(f"top_k: {params.top_k} is below 0 (0 switches it off)", "top_k")
    if params.max_tokens < 0:
        raise RequestError(f"max_tokens: {params.max_tokens} is below 0", "max_tokens")
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_LOGPROBS:
        raise RequestError(f"logprobs: {params.logprobs} is outside 0..{MAX_LOGPROBS}", "logprobs")
    for token_id in params.stop_token_ids:
        _check_token_id(token_id, vocab_size, "stop_token_ids")


def _check_token_id(token_id: int, vocab_size: int, param: str) -> None:
    if not 0 <= token_id < vocab_size:
        raise RequestError(f"{param}: token id {token_id} is outside the vocabulary 0..{vocab_size - 1}", param)
