"""What clients get: the response bodies of the OpenAI API. Field names and nesting are OpenAI's."""

from typing import Literal

from pydantic import BaseModel, Field

FinishWord = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(BaseModel):
    """Of the tokens read, those that need not be computed: earlier prompts began alike."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """One entry per token in each list; ``text_offset`` is where the token begins in the choice's text.

    Of an echoed prompt's first token there is no log-probability.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """The continuation of one prompt, or a piece of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishWord | None


class Completion(BaseModel):
    """A whole completion or one chunk of a stream; ``usage`` is null in chunks that do not carry it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """A token that could have been chosen; ``bytes`` is null where the token is not whole characters."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    """A chosen token and the most likely ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """One entry per token."""

    content: list[ChatTokenLogprob]


class FunctionCall(BaseModel):
    """The function and its arguments, as JSON."""

    name: str
    arguments: str


class MessageToolCall(BaseModel):
    """A call that the model makes."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class DeltaToolCall(MessageToolCall):
    """A call, whole, in a chunk; ``index`` counts the calls of a choice."""

    index: int


class AssistantMessage(BaseModel):
    """The model's turn; without content where it only makes calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[MessageToolCall] | None = Field(default=None, exclude_if=lambda calls: calls is None)


class ChatChoice(BaseModel):
    """The model's turn and why it ended."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord


class ChatCompletion(BaseModel):
    """A whole chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    """What a chunk adds to the message; empty in the chunk that says why it ended."""

    role: Literal["assistant"] | None = Field(default=None, exclude_if=lambda role: role is None)
    content: str | None = Field(default=None, exclude_if=lambda content: content is None)
    tool_calls: list[DeltaToolCall] | None = Field(default=None, exclude_if=lambda calls: calls is None)


class ChatChunkChoice(BaseModel):
    """A piece of the model's turn."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord | None


class ChatCompletionChunk(BaseModel):
    """One chunk of a stream; the one that counts tokens has no choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Model(BaseModel):
    """The model served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "quantpipe"
    max_model_len: int


class ModelList(BaseModel):
    """All models served: one."""

    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(BaseModel):
    """The tokens of a prompt; ``token_strs`` are their names in the vocabulary, if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """The text of tokens."""

    prompt: str


Chunk = Completion | ChatCompletionChunk
Whole = Completion | ChatCompletion
