"""From engine steps to text: detokenizing, stop strings and token logprobs kept in step. Knows no HTTP."""

from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from quantpipe.engine.request import FinishReason, StepOutput, TokenLogprob
from quantpipe.engine.tokenizer import REPLACEMENT, DetokenizerStream
from quantpipe.errors import QuantpipeError, RequestError
from quantpipe.serve.replies import FinishWord
from quantpipe.serve.stops import StopMatcher
from quantpipe.serve.submission import EngineFailedError, Submission, UnavailableError


@dataclass(frozen=True)
class PlacedToken:
    """A token and where its characters begin and end in the choice's text.

    The log-probability of a prompt's first token, which nothing predicts, is NaN.
    """

    logprob: TokenLogprob
    start: int
    end: int


@dataclass(frozen=True)
class TextDelta:
    """What was added to one choice: text, the tokens whose text is now complete, and on the last the reason it ended.

    ``num_tokens`` counts the choice's tokens so far. ``num_cached_tokens`` are those of the prompt that were not
    computed, 0 in all choices but the prompt's first, which alone says how long the prompt was ``queued_s``. Its first
    delta has the ``prompt_logprobs``, if asked for.
    """

    text: str
    tokens: tuple[PlacedToken, ...]
    num_tokens: int
    finish_reason: FinishWord | None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    queued_s: float | None = None


class ChoiceText:
    """One choice's growing text. A token is reported only once all of its text has been let out.

    A stop string counts only where it ends after the text of the first ``min_tokens`` tokens. ``token_ids`` are those
    read so far.
    """

    def __init__(self, detokenizer: DetokenizerStream, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._waiting: deque[PlacedToken] = deque()
        self._num_read_chars = 0
        self._num_sent_chars = 0
        self._num_tokens = 0
        self.token_ids: list[int] = []

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._matcher.stop_string

    def push(self, output: StepOutput) -> TextDelta:
        """Take one step's tokens; a finish reason in the delta means that nothing more will follow."""
        text = ""
        num_text_tokens = len(output.text_token_ids)  # a token that ends the request is counted, but is not text
        for position, token_id in enumerate(output.token_ids):
            start = self._num_read_chars
            self._num_tokens += 1
            self.token_ids.append(token_id)
            if position < num_text_tokens:
                text += self._read(self._detokenizer.push([token_id]))
            if output.logprobs:
                self._waiting.append(PlacedToken(output.logprobs[position], start, self._num_read_chars))
            if self._matcher.stopped:
                break
        if output.finish_reason is not None and not self._matcher.stopped:
            held = self._detokenizer.finish()
            if output.finish_reason is FinishReason.LENGTH:
                held = held.rstrip(REPLACEMENT)  # max_tokens cut a character in two: its first half is no text
            text += self._read(held)
            text += self._matcher.finish()
        return self._delta(text, output)

    def _read(self, text: str) -> str:
        self._num_read_chars += len(text)
        return self._matcher.push(text, may_stop=self._num_tokens > self._min_tokens)

    def _delta(self, text: str, output: StepOutput) -> TextDelta:
        self._num_sent_chars += len(text)
        tokens: list[PlacedToken] = []
        while self._waiting and self._waiting[0].end <= self._num_sent_chars:
            tokens.append(self._waiting.popleft())
        finish_reason: FinishWord | None = None
        if self._matcher.stopped:
            finish_reason = "stop"
        elif output.finish_reason is not None:
            finish_reason = "length" if output.finish_reason is FinishReason.LENGTH else "stop"
        return TextDelta(
            text,
            tuple(tokens),
            self._num_tokens,
            finish_reason,
            output.num_cached_tokens,
            output.prompt_logprobs,
            output.queued_s,
        )


async def text_deltas(submission: Submission, choices: Sequence[ChoiceText]) -> AsyncIterator[tuple[int, TextDelta]]:
    """The deltas of all choices as they come, each with the choice's index; empty ones are left out.

    Raises what ``Submission.outputs`` raises, UnavailableError where a prompt was not begun in the time that the client
    gave it, and where the engine had to give one up, EngineFailedError, or RequestError if its own parameters are to
    blame.
    """
    async for index, output in submission.outputs():
        if output.finish_reason is FinishReason.EXPIRED:
            late = UnavailableError(output.error or "not begun in time", "queue_timeout")
            submission.end(late)
            raise late
        if output.finish_reason is FinishReason.ABORT:
            failure = _failure(output)
            submission.end(failure)
            raise failure
        delta = choices[index].push(output)
        if delta.finish_reason is not None and output.finish_reason is None:
            submission.abort(index)  # a stop string: the engine does not know about it
        if delta.text or delta.tokens or delta.prompt_logprobs or delta.finish_reason is not None:
            yield index, delta


def _failure(output: StepOutput) -> QuantpipeError:
    reason = output.error or "the engine gave up this request"
    return RequestError(reason) if output.is_refused else EngineFailedError(reason)
