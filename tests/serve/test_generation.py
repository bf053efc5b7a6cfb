"""Text, stop strings and logprobs of one choice, token by token."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantpipe.engine.request import FinishReason, SamplingParams, StepOutput, TokenLogprob
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import QuantpipeError, RequestError
from quantpipe.serve.generation import ChoiceText, TextDelta, text_deltas
from quantpipe.serve.submission import EngineFailedError, PromptJob, Submission

EOS = 257


def deltas(
    tokenizer: Tokenizer,
    text: str,
    stops: Sequence[str] = (),
    end: FinishReason = FinishReason.LENGTH,
    min_tokens: int = 0,
) -> list[TextDelta]:
    choice = ChoiceText(tokenizer.stream(), stops, min_tokens)
    token_ids = [*tokenizer.encode(text), *([EOS] if end is FinishReason.STOP else [])]
    made: list[TextDelta] = []
    for position, token_id in enumerate(token_ids):
        reason = end if position == len(token_ids) - 1 else None
        made.append(choice.push(StepOutput("r", (token_id,), (TokenLogprob(token_id, -1.0, True),), reason)))
        if made[-1].finish_reason is not None:
            break
    return made


@given(text=st.text(alphabet="ab ÿ好👩🏽‍🚀한", min_size=1, max_size=12))
def test_characters_are_never_split_and_add_up_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    made = deltas(tokenizer, text)
    assert "".join(delta.text for delta in made) == text
    assert not any("\ufffd" in delta.text for delta in made)
    assert made[-1].finish_reason == "length"
    assert [token.logprob.token_id for delta in made for token in delta.tokens] == tokenizer.encode(text)


def test_half_a_character_at_the_token_limit_is_no_text(tokenizer: Tokenizer) -> None:
    cut = tokenizer.decode(tokenizer.encode("a好")[:-1])
    assert cut == "a\ufffd"
    for end, expected in ((FinishReason.LENGTH, "a"), (FinishReason.STOP, cut)):
        choice = ChoiceText(tokenizer.stream(), [])
        token_ids = [*tokenizer.encode("a好")[:-1], *([EOS] if end is FinishReason.STOP else [])]
        text = "".join(
            choice.push(StepOutput("r", (token_id,), (), end if number == len(token_ids) else None)).text
            for number, token_id in enumerate(token_ids, 1)
        )
        assert text == expected


def test_stop_string_across_tokens_ends_the_choice_and_takes_its_tokens_along(tokenizer: Tokenizer) -> None:
    made = deltas(tokenizer, "one</end>two", ["</end>"])
    assert "".join(delta.text for delta in made) == "one"
    assert made[-1].finish_reason == "stop"
    shown = [token.logprob.token_id for delta in made for token in delta.tokens]
    assert shown == tokenizer.encode("one")
    assert made[-1].num_tokens == len(tokenizer.encode("one</end>"))


def test_stop_string_that_ends_within_the_minimum_length_is_text(tokenizer: Tokenizer) -> None:
    for min_tokens, expected in ((0, ""), (1, ""), (2, "ab"), (3, "ab"), (4, "abab"), (5, "abab"), (6, "ababab")):
        made = deltas(tokenizer, "ababab", ["ab"], min_tokens=min_tokens)
        assert "".join(delta.text for delta in made) == expected, min_tokens
        assert made[-1].finish_reason == ("length" if min_tokens == 6 else "stop")
        assert made[-1].num_tokens >= min_tokens


def test_tokens_held_back_with_a_possible_stop_come_when_it_was_none(tokenizer: Tokenizer) -> None:
    made = deltas(tokenizer, "a</b", ["</end>"])
    assert [delta.text for delta in made] == ["a", "", "", "</b"]
    assert [len(delta.tokens) for delta in made] == [1, 0, 0, 3]
    assert [token.start for delta in made for token in delta.tokens] == [0, 1, 2, 3]


def test_beginning_of_a_stop_at_the_end_is_let_out(tokenizer: Tokenizer) -> None:
    made = deltas(tokenizer, "a<", ["</end>"], FinishReason.STOP)
    assert "".join(delta.text for delta in made) == "a<"
    assert made[-1].finish_reason == "stop"


def test_token_that_ended_the_request_is_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tokenizer.stream(), ())
    (token_id,) = tokenizer.encode("x")
    delta = choice.push(StepOutput("r", (token_id,), (), FinishReason.STOP))
    assert (delta.text, delta.num_tokens, delta.finish_reason) == ("", 1, "stop")


def test_several_tokens_in_one_step_stop_at_the_stop_string(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(tokenizer.stream(), ["END"])
    delta = choice.push(StepOutput("r", tuple(tokenizer.encode("okENDmore")), (), None))
    assert (delta.text, delta.num_tokens, delta.finish_reason) == ("ok", 5, "stop")


@pytest.mark.parametrize(("is_refused", "kind"), [(True, RequestError), (False, EngineFailedError)])
def test_request_that_the_engine_gives_up_fails_on_whoever_is_to_blame(
    is_refused: bool, kind: type[QuantpipeError]
) -> None:
    async def run() -> None:
        submission = Submission("a", [PromptJob((1,), SamplingParams())], lambda _: None, lambda _: None)
        output = StepOutput("a-0", (), (), FinishReason.ABORT, "grammar: too complex", is_refused=is_refused)
        submission.deliver(0, output)
        async for _ in text_deltas(submission, []):
            raise AssertionError("nothing came of it")

    with pytest.raises(kind, match="grammar: too complex"):
        asyncio.run(run())
