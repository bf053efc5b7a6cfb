"""What a caller asks of the engine and what comes back. Requests are frozen; ``Sequence`` is their mutable progress."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

# Called with the index of the first prompt position of a chunk and its float32 logits [rows, vocab]:
# row i are the logits *after* reading prompt_ids[first + i], i.e. they predict position first + i + 1.
PromptLogitsSink = Callable[[int, npt.NDArray[np.float32]], None]


@dataclass(frozen=True)
class SamplingParams:
    """How new tokens are chosen. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 switch those filters off.

    ``max_tokens`` 0 only reads the prompt (for scoring). ``seed`` makes a request's draws independent of what else
    is in the batch. ``logprobs`` n returns the n most likely alternatives and the chosen token's log-probability.
    ``prompt_logprobs`` returns the log-probability of each prompt token after the first.
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
    """One prompt and how to continue it."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    prompt_logits_sink: PromptLogitsSink | None = None


@dataclass(frozen=True)
class StepOutput:
    """What one engine step produced for one request: usually one token; on the last, the reason it ended."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. ``prompt_logprobs`` has one entry per prompt token after the first, if asked for."""

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass
class Sequence:
    """A request's progress. ``num_computed_tokens`` counts tokens whose keys and values are in the cache."""

    request: Request
    token_ids: list[int]
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)
