"""From text deltas to OpenAI's bodies: whole replies and chunks of a stream. Pure: no engine, no HTTP."""

import math
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quantpipe.engine.request import TokenLogprob
from quantpipe.engine.tokenizer import REPLACEMENT, Tokenizer
from quantpipe.serve import replies
from quantpipe.serve.generation import PlacedToken, TextDelta
from quantpipe.serve.replies import FinishWord
from quantpipe.serve.tools.calls import Call, CallReader, Content, Part
from quantpipe.serve.tools.request_tools import RequestTools

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(frozen=True)
class WholeChoice:
    """All deltas of one choice, put together."""

    text: str
    tokens: tuple[PlacedToken, ...]
    finish_reason: FinishWord


class Renderer(Protocol):
    """How one endpoint words its replies."""

    @property
    def skips_special_tokens(self) -> bool:
        """Whether special tokens are no part of the text that it is given."""

    def opening_chunks(self) -> Iterable[replies.Chunk]:
        """Sent before the first delta."""

    def delta_chunks(self, index: int, delta: TextDelta) -> Iterable[replies.Chunk]:
        """What one delta becomes."""

    def usage_chunk(self, usage: replies.Usage) -> replies.Chunk:
        """The last chunk, without choices."""

    def whole(self, choices: Sequence[WholeChoice], usage: replies.Usage) -> replies.Whole:
        """The reply that is not streamed."""


@dataclass(frozen=True)
class CompletionRenderer:
    """Words the replies of ``/v1/completions``."""

    model_name: str
    tokenizer: Tokenizer
    num_top_logprobs: int | None
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def skips_special_tokens(self) -> bool:
        return True

    def opening_chunks(self) -> list[replies.Completion]:
        return []

    def delta_chunks(self, index: int, delta: TextDelta) -> list[replies.Completion]:
        return [self._reply([self._choice(index, delta.text, delta.tokens, delta.finish_reason)], None)]

    def usage_chunk(self, usage: replies.Usage) -> replies.Completion:
        return self._reply([], usage)

    def whole(self, choices: Sequence[WholeChoice], usage: replies.Usage) -> replies.Completion:
        rendered = [
            self._choice(i, choice.text, choice.tokens, choice.finish_reason) for i, choice in enumerate(choices)
        ]
        return self._reply(rendered, usage)

    def _reply(self, choices: list[replies.CompletionChoice], usage: replies.Usage | None) -> replies.Completion:
        return replies.Completion(id=self.id, created=self.created, model=self.model_name, choices=choices, usage=usage)

    def _choice(
        self, index: int, text: str, tokens: Sequence[PlacedToken], finish_reason: FinishWord | None
    ) -> replies.CompletionChoice:
        logprobs = None if self.num_top_logprobs is None else self._logprobs(tokens, self.num_top_logprobs)
        return replies.CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason)

    def _logprobs(self, tokens: Sequence[PlacedToken], num_top: int) -> replies.CompletionLogprobs:
        top = [self._top_logprobs(token.logprob) for token in tokens]
        return replies.CompletionLogprobs(
            tokens=[token_text(self.tokenizer, token.logprob.token_id) for token in tokens],
            token_logprobs=[_known(token.logprob.logprob) for token in tokens],
            top_logprobs=top if num_top else None,
            text_offset=[token.start for token in tokens],
        )

    def _top_logprobs(self, chosen: TokenLogprob) -> dict[str, float] | None:
        """The most likely tokens, and the chosen one even if it is not among them; None where nothing is known."""
        if _known(chosen.logprob) is None:
            return None
        pairs = dict(chosen.top) | {chosen.token_id: chosen.logprob}
        return {token_text(self.tokenizer, token_id): _finite(value) for token_id, value in pairs.items()}


@dataclass(frozen=True)
class ChatRenderer:
    """Words the replies of ``/v1/chat/completions``."""

    model_name: str
    tokenizer: Tokenizer
    has_logprobs: bool
    num_choices: int = 1
    tools: RequestTools | None = None
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    _readers: dict[int, CallReader] = field(default_factory=dict)  # of choices that are streamed

    @property
    def skips_special_tokens(self) -> bool:
        """Not where calls are marked by some."""
        return self.tools is None or not self.tools.special_marks

    def opening_chunks(self) -> list[replies.ChatCompletionChunk]:
        opening = replies.ChatDelta(role="assistant", content="")
        return [self._chunk(index, opening, (), None) for index in range(self.num_choices)]

    def delta_chunks(self, index: int, delta: TextDelta) -> list[replies.ChatCompletionChunk]:
        deltas, finish_reason = [replies.ChatDelta(content=delta.text)] if delta.text else [], delta.finish_reason
        if self.tools is not None:
            reader = self._readers.setdefault(index, self.tools.reader())
            deltas = _deltas_of(reader, delta)
            finish_reason = _finish_word(reader, finish_reason)
        if delta.tokens and not deltas:  # their text is held back, or none
            deltas = [replies.ChatDelta(content="")]
        tokens = [delta.tokens, *[()] * len(deltas)]
        chunks = [self._chunk(index, own, tokens[place], None) for place, own in enumerate(deltas)]
        if finish_reason is not None:
            chunks.append(self._chunk(index, replies.ChatDelta(), (), finish_reason))
        return chunks

    def usage_chunk(self, usage: replies.Usage) -> replies.ChatCompletionChunk:
        return replies.ChatCompletionChunk(
            id=self.id, created=self.created, model=self.model_name, choices=[], usage=usage
        )

    def whole(self, choices: Sequence[WholeChoice], usage: replies.Usage) -> replies.ChatCompletion:
        rendered = [self._whole_choice(index, choice) for index, choice in enumerate(choices)]
        return replies.ChatCompletion(
            id=self.id, created=self.created, model=self.model_name, choices=rendered, usage=usage
        )

    def _whole_choice(self, index: int, choice: WholeChoice) -> replies.ChatChoice:
        message, finish_reason = replies.AssistantMessage(content=choice.text), choice.finish_reason
        if self.tools is not None:
            reader = self.tools.reader()
            message = _message([*reader.push(choice.text), *reader.finish()])
            finish_reason = _finish_word(reader, finish_reason) or finish_reason
        logprobs = self._logprobs(choice.tokens) if self.has_logprobs else None
        return replies.ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=finish_reason)

    def _chunk(
        self, index: int, delta: replies.ChatDelta, tokens: Sequence[PlacedToken], finish_reason: FinishWord | None
    ) -> replies.ChatCompletionChunk:
        logprobs = self._logprobs(tokens) if self.has_logprobs and tokens else None
        choice = replies.ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return replies.ChatCompletionChunk(id=self.id, created=self.created, model=self.model_name, choices=[choice])

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> replies.ChatLogprobs:
        return replies.ChatLogprobs(
            content=[
                replies.ChatTokenLogprob(
                    **self._top(token.logprob.token_id, token.logprob.logprob).model_dump(),
                    top_logprobs=[self._top(token_id, value) for token_id, value in token.logprob.top],
                )
                for token in tokens
            ]
        )

    def _top(self, token_id: int, logprob: float) -> replies.TopLogprob:
        text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        is_whole = REPLACEMENT not in text
        return replies.TopLogprob(
            token=token_text(self.tokenizer, token_id),
            logprob=_finite(logprob),
            bytes=list(text.encode()) if is_whole else None,
        )


def _deltas_of(reader: CallReader, delta: TextDelta) -> list[replies.ChatDelta]:
    """What a delta of text adds to the message, a call at a time."""
    num_calls, deltas = reader.num_calls, []
    parts = reader.push(delta.text)
    if delta.finish_reason is not None:
        parts += reader.finish()
    for part in parts:
        if isinstance(part, Content):
            deltas.append(replies.ChatDelta(content=part.text))
        else:
            call = replies.DeltaToolCall(index=num_calls, **_call(part).model_dump())
            deltas.append(replies.ChatDelta(tool_calls=[call]))
            num_calls += 1
    return deltas


def _message(parts: Sequence[Part]) -> replies.AssistantMessage:
    content = "".join(part.text for part in parts if isinstance(part, Content))
    calls = [_call(part) for part in parts if isinstance(part, Call)]
    return replies.AssistantMessage(content=None if calls and not content else content, tool_calls=calls or None)


def _call(call: Call) -> replies.MessageToolCall:
    function = replies.FunctionCall(name=call.name, arguments=call.arguments)
    return replies.MessageToolCall(id=call.id, function=function)


def _finish_word(reader: CallReader, word: FinishWord | None) -> FinishWord | None:
    return "tool_calls" if word == "stop" and reader.num_calls else word


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text, or ``token_id:<id>`` where it is only part of a character."""
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    return f"token_id:{token_id}" if REPLACEMENT in text else text


def _known(logprob: float) -> float | None:
    """None for the first token of a prompt, which nothing predicts."""
    return None if math.isnan(logprob) else _finite(logprob)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
