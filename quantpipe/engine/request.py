"""What a caller asks of the engine and what comes back. Requests are frozen; ``Sequence`` is their mutable progress."""

import math
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from quantpipe.engine.constraint import Constraint
from quantpipe.engine.prefix_cache import PrefixNamespace
from quantpipe.engine.sampled import Sampled
from quantpipe.engine.sampling_params import SamplingParams as SamplingParams
from quantpipe.engine.sampling_params import check_params, check_token_id
from quantpipe.errors import RequestError, suggest

# Called with the index of the first prompt position of a chunk and its float32 logits [rows, vocab]:
# row i are the logits *after* reading prompt_ids[first + i], i.e. they predict position first + i + 1.
# Chunks arrive in order and cover each prompt position once, from prompt_logprobs_from - 1 on.
# The array is valid during the call only: copy to keep.
PromptLogitsSink = Callable[[int, npt.NDArray[np.float32]], None]

QosClass = Literal["interactive", "standard", "batch"]
QOS_CLASSES: tuple[QosClass, ...] = get_args(QosClass)
# As of Unix processes: lower goes first.
PRIORITIES = range(-20, 20)


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
    EXPIRED = "expired"  # not begun within its max_queue_s


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Prompts share what was computed of a common prefix only under the same ``cache_salt``: a secret of each tenant.
    Who runs first is up to the engine's policy: ``priority`` (lower first), ``qos`` and ``deadline_s`` (seconds from
    ``arrival_s``, which is a time of the engine's clock, to the last token). One that is not begun within
    ``max_queue_s`` seconds of its arrival ends with ``EXPIRED``.
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
    max_queue_s: float | None = None

    @property
    def is_scored(self) -> bool:
        """Whether logits of many prompt positions are wanted, not only those of the last."""
        return self.params.prompt_logprobs is not None or self.prompt_logits_sink is not None

    @property
    def first_scored_position(self) -> int:
        """Where the first prompt logits are wanted, if it is scored."""
        return self.params.prompt_logprobs_from - 1


@dataclass(frozen=True)
class StepOutput:
    """What one engine step produced for one sample: usually one token; on the last, the reason it ended.

    ``index`` is which of the request's samples it is. ``error`` says in one line why one that nobody aborted ended with
    ``ABORT`` or ``EXPIRED``. ``num_cached_tokens`` of the prompt were found, not computed, and it waited ``queued_s``
    seconds until it was begun; both are said of the first sample only.
    ``is_refused`` says that the request's own parameters are to blame for the error.
    ``prompt_logprobs``, where asked for, come whole with the first output of the first sample.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    error: str | None = None
    index: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    is_refused: bool = False
    queued_s: float | None = None

    @property
    def text_token_ids(self) -> tuple[int, ...]:
        """``token_ids`` without the token that stopped the request: what to show as text."""
        return self.token_ids[:-1] if self.finish_reason is FinishReason.STOP else self.token_ids


@dataclass(frozen=True)
class SampleOutput:
    """One of the samples of a finished request, the ``index``-th.

    One that ends with ``STOP`` has the token that stopped it as the last of ``token_ids`` (as in vLLM), so that counts
    and log-probabilities cover every token computed; ``text_token_ids`` leaves it out.
    """

    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None

    @property
    def text_token_ids(self) -> tuple[int, ...]:
        """``token_ids`` without the token that stopped the sample: what to show as text."""
        return self.token_ids[:-1] if self.finish_reason is FinishReason.STOP else self.token_ids


@dataclass(frozen=True)
class RequestOutput:
    """A finished request: its ``samples`` in order, and the first of them in fields of its own.

    ``prompt_logprobs`` has one entry per prompt token from ``prompt_logprobs_from`` on, if asked for.
    ``num_cached_tokens`` of the prompt were found, not computed.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    samples: tuple[SampleOutput, ...] = ()
    num_cached_tokens: int = 0

    @property
    def text_token_ids(self) -> tuple[int, ...]:
        """``token_ids`` without the token that stopped the first sample: what to show as text."""
        return self.token_ids[:-1] if self.finish_reason is FinishReason.STOP else self.token_ids


@dataclass(eq=False)
class Sequence:
    """A request's progress: its prompt and what was generated after it.

    ``num_computed_tokens`` counts tokens whose keys and values are in the cache: zero again after preemption.
    ``num_seen_tokens`` is the most it ever was: what was delivered for positions below it is not delivered again.
    ``seed`` is the request's own, or one drawn for it. ``namespace`` is where its blocks may be shared.
    ``eos_token_ids`` are the model's; ``constraint`` is that of the request's grammar, and this sequence's own.
    ``index`` is which of the request's samples it is. The first has the others as ``forks``: they start where its
    prompt ends, and the last ``num_pending_forks`` of them have not yet.

    Of ``block_table``, the first ``num_shared_blocks`` were there before it; of its prompt, ``num_cached_tokens`` when
    it was first admitted, which was ``queued_s`` seconds after it came. What its place in the order depends on is
    settled when it arrives: its ``number``, how long an output is expected of it, and how long a token took then.

    Behind its sink blocks, ``block_table`` lacks ``num_dropped_blocks``: nothing can see their tokens any more.
    ``gap`` are tokens (first, end) that need not be read when it comes to them, for the same reason.

    From ``plain_from`` tokens on, nothing of the logits is wanted but where they are largest; None: always more.
    ``takes_drafts`` is whether tokens may be guessed for it: not once there was none to choose with guesses behind it.
    """

    request: Request
    token_ids: list[int]
    seed: int = 0
    namespace: PrefixNamespace = field(default_factory=PrefixNamespace)
    eos_token_ids: frozenset[int] = frozenset()
    index: int = 0
    num_pending_forks: int = 0
    forks: "tuple[Sequence, ...]" = field(default=(), repr=False)
    num_computed_tokens: int = 0
    num_seen_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    num_shared_blocks: int = 0
    num_dropped_blocks: int = 0
    gap: tuple[int, int] | None = None
    num_cached_tokens: int = 0
    queued_s: float | None = None
    number: int = 0
    expected_new_tokens: int = 0
    token_s: float = 0.0
    takes_drafts: bool = True
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    constraint: InitVar[Constraint | None] = None
    plain_from: int | None = field(init=False, repr=False)
    _sampled: Sampled = field(init=False, repr=False)

    def __post_init__(self, constraint: Constraint | None) -> None:
        params = self.request.params
        self._sampled = Sampled(params, self.request.prompt_ids, self.seed, self.eos_token_ids, constraint)
        is_plain = self._sampled.is_plain and params.logprobs is None and not self.request.is_scored
        self.plain_from = self.num_prompt_tokens + params.min_tokens if is_plain else None

    def sampled(self) -> Sampled:
        """What the next token depends on besides its logits. Takes as long as what was appended since the last call."""
        for token_id in self.token_ids[self.num_prompt_tokens + self._sampled.num_generated :]:
            self._sampled.append(token_id)
        return self._sampled

    @property
    def pending_forks(self) -> "tuple[Sequence, ...]":
        return self.forks[len(self.forks) - self.num_pending_forks :] if self.num_pending_forks else ()

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
    def num_settled_tokens(self) -> int:
        """Of a scored prompt, positions before here were delivered, or were never wanted: they may be found."""
        return max(self.num_seen_tokens, self.request.first_scored_position)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens still to be read before the next one can be chosen: 1 for a sequence that is decoding."""
        return len(self.token_ids) - self.num_computed_tokens


def check_request(request: Request, vocab_size: int, max_model_len: int, is_endless: bool = False) -> None:
    """Raise RequestError, naming the parameter as an HTTP caller knows it, for what can never be served.

    With ``is_endless`` only the prompt has to fit in ``max_model_len``.
    """
    check_params(request.params, vocab_size)
    _check_order(request)
    prompt_ids, max_tokens = request.prompt_ids, request.params.max_tokens
    if not prompt_ids:
        raise RequestError("prompt: empty; give at least one token", "prompt")
    for token_id in (min(prompt_ids), max(prompt_ids)):
        check_token_id(token_id, vocab_size, "prompt")
    if request.first_scored_position >= len(prompt_ids):
        raise RequestError(
            f"prompt_logprobs_from: {request.params.prompt_logprobs_from} is beyond a prompt of {len(prompt_ids):,} "
            "tokens",
            "prompt_logprobs_from",
        )
    if len(prompt_ids) + min(max_tokens, 1) > max_model_len:
        raise RequestError(
            f"prompt: {len(prompt_ids):,} tokens do not fit in max_model_len {max_model_len:,} with one new token; "
            "shorten it or raise engine.max_model_len",
            "prompt",
        )
    if len(prompt_ids) + max_tokens > max_model_len and not is_endless:
        raise RequestError(
            f"max_tokens: {max_tokens:,} after a prompt of {len(prompt_ids):,} tokens exceed max_model_len "
            f"{max_model_len:,}; ask for at most {max_model_len - len(prompt_ids):,}",
            "max_tokens",
        )


def _check_order(request: Request) -> None:
    if request.priority not in PRIORITIES:
        raise RequestError(
            f"priority: {request.priority} is outside {PRIORITIES[0]} (first) .. {PRIORITIES[-1]} (last)", "priority"
        )
    if request.qos not in QOS_CLASSES:
        raise RequestError(f"qos: unknown '{request.qos}'{suggest(request.qos, QOS_CLASSES)}", "qos")
    # Written so that NaN, which compares false with everything, is refused.
    if request.deadline_s is not None and not 0 < request.deadline_s < math.inf:
        raise RequestError(f"deadline_s: {request.deadline_s} is not a finite time above 0", "deadline_s")
    if request.max_queue_s is not None and not 0 < request.max_queue_s < math.inf:
        raise RequestError(f"max_queue_s: {request.max_queue_s} is not a finite time above 0", "max_queue_s")
