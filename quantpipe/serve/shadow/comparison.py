"""What two arms made of one request, side by side. Plain data; knows no engine and no HTTP."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from quantpipe.serve.generation import ChoiceText, TextDelta
from quantpipe.serve.response_body import Deltas


@dataclass
class ChoiceRecord:
    """One choice as one arm gave it. Times are seconds: to the first text, and to the last."""

    parts: list[str] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    ttft_s: float = 0.0
    last_s: float = 0.0

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.parts)

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first text; None where there is none."""
        return (self.last_s - self.ttft_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


class AnswerRecord:
    """All choices of one answer, as they come. Timed from ``submitted_s``: when an engine accepts is its own affair."""

    def __init__(self, texts: Sequence[ChoiceText], submitted_s: float) -> None:
        self.choices = [ChoiceRecord() for _ in texts]
        self._texts = texts
        self._submitted_s = submitted_s

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def token_ids(self, index: int) -> Sequence[int]:
        """Those of one choice."""
        return self._texts[index].token_ids

    def note(self, index: int, delta: TextDelta) -> None:
        """A delta of one choice came just now."""
        own = self.choices[index]
        own.last_s = time.monotonic() - self._submitted_s
        if not own.num_tokens:
            own.ttft_s = own.last_s
        own.parts.append(delta.text)
        own.num_tokens = delta.num_tokens
        own.finish_reason = delta.finish_reason

    async def noted(self, deltas: Deltas) -> Deltas:
        """Pass the deltas on and note them."""
        async for index, delta in deltas:
            self.note(index, delta)
            yield index, delta

    async def read(self, deltas: Deltas) -> None:
        """Note all of them."""
        async for index, delta in deltas:
            self.note(index, delta)


@dataclass(frozen=True)
class ChoiceComparison:
    """``reasons`` are why the two ended. ``first_difference`` is the position of the first token that differs; None
    where none does, or where the arms' tokens do not mean the same.
    """

    is_text_equal: bool
    reasons: tuple[str, str]
    first_difference: int | None


def compared(first: AnswerRecord, second: AnswerRecord, has_same_tokens: bool) -> tuple[ChoiceComparison, ...]:
    """Choice by choice. Of texts that are equal, the tokens may still differ."""
    return tuple(
        ChoiceComparison(
            own.text == other.text,
            (own.finish_reason or "", other.finish_reason or ""),
            first_difference(first.token_ids(index), second.token_ids(index)) if has_same_tokens else None,
        )
        for index, (own, other) in enumerate(zip(first.choices, second.choices, strict=True))
    )


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Where two rows of tokens part; the length of the shorter where it is the beginning of the other."""
    for position, (own, other) in enumerate(zip(first, second, strict=False)):
        if own != other:
            return position
    return None if len(first) == len(second) else min(len(first), len(second))
