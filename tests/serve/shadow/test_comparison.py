"""Two answers side by side: texts, the first token that differs, why they ended, times."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from quantpipe.engine.request import FinishReason, StepOutput
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.serve.generation import ChoiceText, TextDelta
from quantpipe.serve.shadow.comparison import AnswerRecord, ChoiceRecord, compared, first_difference


@pytest.mark.parametrize(
    ("first", "second", "position"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [4], 0), ([], [], None)],
)
def test_first_difference_is_where_they_part(first: list[int], second: list[int], position: int | None) -> None:
    assert first_difference(first, second) == first_difference(second, first) == position


def answer(tokenizer: Tokenizer, *choices: Sequence[int], reason: FinishReason = FinishReason.LENGTH) -> AnswerRecord:
    """As an engine gives it, a token in a step."""
    texts = [ChoiceText(tokenizer.stream(), ()) for _ in choices]
    record = AnswerRecord(texts, time.monotonic())

    async def deltas() -> AsyncIterator[tuple[int, TextDelta]]:
        for index, token_ids in enumerate(choices):
            for place, token_id in enumerate(token_ids):
                ended = reason if place == len(token_ids) - 1 else None
                yield index, texts[index].push(StepOutput("r", (token_id,), (), ended, index=index))

    asyncio.run(record.read(deltas()))
    return record


def test_choices_are_compared_one_by_one(tokenizer: Tokenizer) -> None:
    first = answer(tokenizer, [65, 66, 67], [65, 66])
    second = answer(tokenizer, [65, 66, 67], [65, 70])
    equal, different = compared(first, second, has_same_tokens=True)
    assert (equal.is_text_equal, equal.first_difference, equal.reasons) == (True, None, ("length", "length"))
    assert (different.is_text_equal, different.first_difference) == (False, 1)
    assert [choice.first_difference for choice in compared(first, second, has_same_tokens=False)] == [None, None]


def test_texts_may_be_equal_where_the_tokens_and_the_reasons_are_not(tokenizer: Tokenizer) -> None:
    first = answer(tokenizer, [65, 66])
    second = answer(tokenizer, [65, 66, 257], reason=FinishReason.STOP)  # ended by itself: that token is no text
    (found,) = compared(first, second, has_same_tokens=True)
    assert (found.is_text_equal, found.first_difference, found.reasons) == (True, 2, ("length", "stop"))


def test_an_answer_is_complete_once_every_choice_has_ended(tokenizer: Tokenizer) -> None:
    assert answer(tokenizer, [65], [66]).is_complete
    record = AnswerRecord([ChoiceText(tokenizer.stream(), ()) for _ in range(2)], 0.0)
    record.note(0, TextDelta("x", (), 1, "stop"))
    assert not record.is_complete


@pytest.mark.parametrize(("num_tokens", "tpot_s"), [(5, 0.5), (1, None), (0, None)])
def test_time_per_token_is_that_after_the_first_text(num_tokens: int, tpot_s: Any) -> None:
    assert ChoiceRecord(["x"], num_tokens, "stop", ttft_s=1.0, last_s=3.0).tpot_s == tpot_s
