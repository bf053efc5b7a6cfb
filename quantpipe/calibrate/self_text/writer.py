"""Texts that a model writes without being asked anything. Knows an engine and a tokenizer, and no files.

A chat model writes both sides: its template is opened at the user's turn, and what it says there is answered by itself
(Xu et al., Magpie, 2024). Any other model goes on from its beginning-of-text token (Liu et al., LLM-QAT, 2023). Draws
are seeded for each sample, so texts depend neither on batching nor on an interruption.
"""

import hashlib
from collections.abc import Sequence

from quantpipe.calibration.rows import Message
from quantpipe.calibration.samples.self_text import SelfTextRequest, WrittenText
from quantpipe.engine.request import RequestOutput, SamplingParams
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import DataError
from quantpipe.evaluate.served import ServedModel
from quantpipe.serve.chat import ChatTemplate

USER_SHARE = 4  # the user's message takes at most one part in this many of a sample's tokens
UNIVERSAL = "und"  # the language of a text that has no opener
_MARK = "\u2402user\u2402"  # stands where the user's text will; templates may strip white space around it


class Writer:
    """One model and its tokenizer, ready to write."""

    def __init__(self, model: ServedModel, tokenizer: Tokenizer) -> None:
        self._model = model
        self._tokenizer = tokenizer
        source = tokenizer.chat_template
        self._template = None if source is None else ChatTemplate.compile(source, tokenizer.special_tokens)

    def write(self, request: SelfTextRequest, numbers: range) -> list[WrittenText]:
        """The samples of these numbers; a sample depends on its number, not on the others."""
        openers = [_opener(request, number) for number in numbers]
        beginnings = [beginning for _, beginning in openers]
        if self._template is None:
            contents: Sequence[str | tuple[Message, ...]] = self._texts(request, numbers, beginnings)
        else:
            contents = self._conversations(self._template, request, numbers, beginnings)
        return [WrittenText(content, language) for content, (language, _) in zip(contents, openers, strict=True)]

    def _texts(self, request: SelfTextRequest, numbers: range, beginnings: Sequence[str]) -> list[str]:
        prompts = [self._opened(beginning) for beginning in beginnings]
        written = self._generate(prompts, request, numbers, "text", request.max_tokens)
        return [_joined(beginning, text) for beginning, text in zip(beginnings, written, strict=True)]

    def _conversations(
        self, template: ChatTemplate, request: SelfTextRequest, numbers: range, beginnings: Sequence[str]
    ) -> list[tuple[Message, ...]]:
        before, _, after = template.render([{"role": "user", "content": _MARK}]).partition(_MARK)
        stops = tuple(self._tokenizer.encode(after)[:1])  # what closes the user's turn
        user_tokens = max(1, request.max_tokens // USER_SHARE)
        prompts = [self._tokenizer.encode(before + beginning) for beginning in beginnings]
        written = self._generate(prompts, request, numbers, "user", user_tokens, stops)
        questions = [_joined(beginning, text) for beginning, text in zip(beginnings, written, strict=True)]
        turns: list[list[Message]] = [[{"role": "user", "content": question}] for question in questions]
        prompts = [self._tokenizer.encode(template.render(turn)) for turn in turns]
        answers = self._generate(prompts, request, numbers, "answer", request.max_tokens - user_tokens, stops)
        return [
            (*turn, {"role": "assistant", "content": answer.strip()}) if turn[0]["content"] and answer.strip() else ()
            for turn, answer in zip(turns, answers, strict=True)
        ]

    def _opened(self, beginning: str) -> list[int]:
        """Token ids that a plain text starts with."""
        token_ids = self._tokenizer.encode(beginning, add_special_tokens=True)
        if beginning and token_ids:
            return token_ids[:-1] if token_ids[-1] == self._tokenizer.eos_token_id else token_ids
        edges = (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id)
        edge = next((token_id for token_id in edges if token_id is not None), None)
        if edge is None:
            raise DataError("kind self: the tokenizer has no BOS or EOS to begin a text with; give openers")
        return [edge]

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        request: SelfTextRequest,
        numbers: range,
        part: str,
        max_tokens: int,
        stops: tuple[int, ...] = (),
    ) -> list[str]:
        params = [
            SamplingParams(
                max_tokens=max(1, max_tokens),
                temperature=request.temperature,
                top_p=request.top_p,
                seed=_seed(request.seed, number, part),
                stop_token_ids=stops,
            )
            for number in numbers
        ]
        return [self._text(output) for output in self._model.generate(prompts, params)]

    def _text(self, output: RequestOutput) -> str:
        if output.error is not None:
            raise DataError(f"kind self: the model cannot go on: {output.error}")
        return self._tokenizer.decode(output.text_token_ids)


def _opener(request: SelfTextRequest, number: int) -> tuple[str, str]:
    return request.openers[number % len(request.openers)] if request.openers else (UNIVERSAL, "")


def _joined(beginning: str, text: str) -> str:
    return (beginning + text).strip() if text.strip() else ""


def _seed(seed: int, number: int, part: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{number}/{part}".encode(), digest_size=8).digest()
    return int.from_bytes(digest)
