"""What clients may send: the request bodies of the OpenAI API, as far as it is served. Knows no engine and no HTTP.

Three kinds of fields: those served, checked in range; those of ``IGNORED``, which never change the output; those of
``NEUTRAL``, which are not served yet and are taken only at the value that asks for nothing. Anything else is an error.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from quantpipe.engine.request import PRIORITIES, QosClass
from quantpipe.engine.sampling_params import MAX_BIAS, MAX_PENALTY, SamplingParams
from quantpipe.errors import suggest

IGNORED = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Not served yet -> the values, besides null, that ask for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "chat_template_kwargs": ({},),
}

# Parts of an assistant message that clients send back as they received them.
NEUTRAL_IN_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
}

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_BIASED_TOKENS = 1024
MAX_SALT_CHARS = 256
MAX_LATENCY_BUDGET_MS = 86_400_000  # a day
MAX_SHOWN_CHARS = 60  # of a name that an error quotes
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def _only_neutral(values: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """``values`` without the fields that ask for nothing; an error for one that asks for something not served."""
    for name in neutral.keys() & values.keys():
        value, accepted = values[name], neutral[name]
        is_neutral = value is None or any(
            value == known and isinstance(value, bool) == isinstance(known, bool) for known in accepted
        )
        if not is_neutral:
            hint = f" or set it to {accepted[0]!r}" if accepted else ""
            raise PydanticCustomError(
                "not_supported", "{param} is not supported yet; leave it out{hint}", {"param": name, "hint": hint}
            )
    return {name: value for name, value in values.items() if name not in neutral}


def _check_unicode(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise PydanticCustomError("unicode", "must be valid Unicode; it holds half of a surrogate pair") from None
    return text


def _shown(name: object) -> str:
    """A client's name for a field, fit to be quoted."""
    return str(name)[:MAX_SHOWN_CHARS].encode("utf-8", "backslashreplace").decode()


def _check_prompt(prompt: Any) -> Any:
    if not isinstance(prompt, str | list):
        raise PydanticCustomError(
            "prompt_type", "must be a string, a list of strings, a list of token ids or a list of lists of token ids"
        )
    if not prompt or (isinstance(prompt, list) and any(part in ("", []) for part in prompt)):
        raise PydanticCustomError("prompt_empty", "must not be empty, nor contain an empty prompt")
    parts = prompt if isinstance(prompt, list) else []
    kinds = set(map(type, parts))
    if not (kinds <= {str} or kinds == {int} or kinds == {list}):
        raise PydanticCustomError("prompt_type", "must hold texts, token ids or lists of token ids, one kind only")
    for token_ids in parts if kinds == {list} else [parts] if kinds == {int} else []:
        if set(map(type, token_ids)) != {int} or min(token_ids) < 0:
            wrong = next(own for own in token_ids if type(own) is not int or own < 0)
            raise PydanticCustomError(
                "token_id", "must hold whole numbers from 0 as token ids, not {id}", {"id": _shown(json.dumps(wrong))}
            )
    return prompt


def _check_stops(stop: str | list[str] | None) -> str | list[str] | None:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS or any(not 0 < len(text) <= MAX_STOP_CHARS for text in stops):
        raise PydanticCustomError(
            "stop", f"must be at most {MAX_STOPS} non-empty strings of at most {MAX_STOP_CHARS} characters"
        )
    return stop


def _token_ids_from_keys(bias: Any) -> Any:
    """JSON knows no integer keys: token ids come as texts. One spelling each, so that none can come twice."""
    if not isinstance(bias, dict):
        return bias
    if len(bias) > MAX_BIASED_TOKENS:
        raise PydanticCustomError("logit_bias", f"must name at most {MAX_BIASED_TOKENS:,} tokens")
    for key, value in bias.items():
        if not TOKEN_ID.fullmatch(key):
            raise PydanticCustomError("logit_bias", "must have token ids as keys, not '{key}'", {"key": _shown(key)})
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and -MAX_BIAS <= value <= MAX_BIAS):
            raise PydanticCustomError(
                "logit_bias", f"must be from {-MAX_BIAS:g} to {MAX_BIAS:g} for token {{key}}", {"key": key}
            )
    return {int(key): float(value) for key, value in bias.items()}


Text = Annotated[str, AfterValidator(_check_unicode)]
TokenIdList = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Prompt = Annotated[Text | list[Text] | TokenIdList | list[TokenIdList], BeforeValidator(_check_prompt)]
Stop = Annotated[Text | list[Text] | None, AfterValidator(_check_stops)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Penalty = Annotated[FiniteFloat, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
LogitBias = Annotated[dict[int, float], BeforeValidator(_token_ids_from_keys, json_schema_input_type=dict[str, float])]


class StreamOptions(BaseModel):
    """``include_usage`` adds a last chunk that counts tokens."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What completions and chat completions have in common."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: Text
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(gt=0)] | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=PRIORITIES[0], le=PRIORITIES[-1])] | None = None
    qos: QosClass | None = None
    latency_budget_ms: Annotated[FiniteFloat, Field(gt=0, le=MAX_LATENCY_BUDGET_MS)] | None = None
    max_queue_ms: Annotated[FiniteFloat, Field(gt=0, le=MAX_LATENCY_BUDGET_MS)] | None = None
    cache_salt: Annotated[Text, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _set_aside_what_is_not_served(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        served = _only_neutral({name: value for name, value in values.items() if name not in IGNORED}, NEUTRAL)
        for name in served:
            if name not in cls.model_fields:
                shown = _shown(name)
                hint = suggest(shown, cls.model_fields)
                raise PydanticCustomError(
                    "unknown", "unknown parameter '{param}'{hint}", {"param": shown, "hint": hint}
                )
        return served

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "{param} needs stream: true", {"param": "stream_options"})
        return self

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk that counts tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def deadline_s(self) -> float | None:
        """Seconds from arrival in which the last token is wanted."""
        return None if self.latency_budget_ms is None else self.latency_budget_ms / 1000

    @property
    def max_queue_s(self) -> float | None:
        """Seconds that the request may wait to be begun."""
        return None if self.max_queue_ms is None else self.max_queue_ms / 1000

    def sampling_params(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """The engine's view; OpenAI's defaults sample at temperature 1."""
        return SamplingParams(
            n=self.n or 1,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias or {},
            seed=None if self.seed is None else self.seed % 2**63,  # generators take no negative seeds
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
        )


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one per choice."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        token_ids = [part for part in self.prompt if isinstance(part, int)]
        return [token_ids] if token_ids else [part for part in self.prompt if not isinstance(part, int)]


class TextPart(BaseModel):
    """One part of a message's content; only text is served."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    """One turn of the conversation."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1)]
    name: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _set_aside_what_is_not_served(cls, values: Any) -> Any:
        return _only_neutral(values, NEUTRAL_IN_MESSAGE) if isinstance(values, dict) else values

    def for_template(self) -> dict[str, str]:
        """What chat templates read: parts joined by line breaks, and ``developer`` under its older name."""
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        message: dict[str, str] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else message | {"name": self.name}


class ChatCompletionRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "{param} needs logprobs: true", {"param": "top_logprobs"})
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError(
                "max_tokens", "{param} differs from its newer name max_completion_tokens", {"param": "max_tokens"}
            )
        return self
