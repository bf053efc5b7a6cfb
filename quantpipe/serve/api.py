"""What clients may send: the request bodies of the OpenAI API, as far as it is served. Knows no engine and no HTTP.

Values are checked in range, and fields against each other.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from quantpipe.engine.constraint import Grammar
from quantpipe.engine.request import PRIORITIES, QosClass
from quantpipe.engine.sampling_params import SamplingParams
from quantpipe.serve.fields import (
    MAX_CHOICES,
    MAX_LATENCY_BUDGET_MS,
    MAX_SALT_CHARS,
    FiniteFloat,
    LogitBias,
    Penalty,
    Prompt,
    Stop,
    Text,
)
from quantpipe.serve.guided_fields import (
    Choices,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    grammar_of_choices,
    grammar_of_schema,
)
from quantpipe.serve.messages import ChatMessage
from quantpipe.serve.request_body import RequestBody
from quantpipe.serve.tools.definitions import ToolChoice, Tools, check_choice

HARMLESS = frozenset(
    {
        "guided_decoding_backend",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    }
)

# Not served -> the values, besides null, that ask for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "guided_grammar": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "chat_template_kwargs": ({},),
}


class StreamOptions(BaseModel):
    """``include_usage`` adds a last chunk that counts tokens."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool = False


class GenerationRequest(RequestBody):
    """What completions and chat completions have in common."""

    HARMLESS = HARMLESS
    NEUTRAL = NEUTRAL

    model: Text
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
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
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | Text | None = None
    guided_regex: Annotated[Text, Field(min_length=1)] | None = None
    guided_choice: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None

    @classmethod
    def elsewhere(cls) -> frozenset[str]:
        """What only the other of the two endpoints has."""
        return frozenset(CompletionRequest.model_fields) | frozenset(ChatCompletionRequest.model_fields)

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "{param} needs stream: true", {"param": "stream_options"})
        return self

    @model_validator(mode="after")
    def _best_of_is_n(self) -> Self:
        if self.best_of is not None and self.best_of > (self.n or 1):
            raise PydanticCustomError(
                "best_of",
                "{param}: choosing the best of more choices than n is not served; ask for n and choose yourself",
                {"param": "best_of"},
            )
        return self

    @model_validator(mode="after")
    def _one_form_at_most(self) -> Self:
        names = [name for name, _ in self._forms()]
        if len(names) > 1:
            raise PydanticCustomError(
                "forms", "{param} cannot be joined with {other}; leave one out", {"param": names[1], "other": names[0]}
            )
        return self

    def _forms(self) -> list[tuple[str, Grammar]]:
        asked = [
            ("response_format", None if self.response_format is None else self.response_format.grammar),
            ("structured_outputs", None if self.structured_outputs is None else self.structured_outputs.grammars[0]),
            ("guided_json", None if self.guided_json is None else _named("guided_json", self.guided_json)),
            ("guided_regex", None if self.guided_regex is None else Grammar("regex", self.guided_regex)),
            ("guided_choice", None if self.guided_choice is None else grammar_of_choices(self.guided_choice)),
        ]
        return [(name, grammar) for name, grammar in asked if grammar is not None]

    @property
    def form(self) -> tuple[str, Grammar] | None:
        """The grammar that the text is to obey, and the field that asks for it."""
        return next(iter(self._forms()), None)

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

    def sampling_params(
        self,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        grammar: Grammar | None = None,
    ) -> SamplingParams:
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
            grammar=grammar,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _no_tokens_are_for_scoring(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError(
                "max_tokens", "{param}: 0 asks for no text; set at least 1, or echo: true", {"param": "max_tokens"}
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one per choice."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        token_ids = [part for part in self.prompt if isinstance(part, int)]
        return [token_ids] if token_ids else [part for part in self.prompt if not isinstance(part, int)]


class ChatCompletionRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "{param} needs logprobs: true", {"param": "top_logprobs"})
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError(
                "max_tokens", "{param} differs from its newer name max_completion_tokens", {"param": "max_tokens"}
            )
        check_choice(self.tools, self.tool_choice)
        if self.tools and self.tool_choice != "none" and self.form is not None:
            raise PydanticCustomError(
                "forms",
                "{param} leaves no room for calls; leave it out, or the tools, or set tool_choice to 'none'",
                {"param": self.form[0]},
            )
        return self


def _named(name: str, schema: Schema | str) -> Grammar:
    try:
        return grammar_of_schema(schema)
    except PydanticCustomError as error:
        raise PydanticCustomError("schema", "{param} {reason}", {"param": name, "reason": error.message()}) from error
