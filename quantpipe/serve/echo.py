"""Prompts in front of what continues them, as ``echo`` asks for. Knows no engine and no HTTP."""

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from quantpipe.engine.request import TokenLogprob
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.serve.generation import PlacedToken, TextDelta


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt as the client gets it back: its text, and where in it each of its tokens begins and ends."""

    text: str
    token_ids: tuple[int, ...]
    places: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, prompt: str | Sequence[int], token_ids: Sequence[int]) -> "EchoedPrompt":
        """A text comes back as it was, even where the tokenizer normalizes it; token ids as the text they stand for."""
        text = prompt if isinstance(prompt, str) else tokenizer.decode(token_ids)
        stream, places, start = tokenizer.stream(), [], 0
        for token_id in token_ids:
            end = min(start + len(stream.push([token_id])), len(text))
            places.append((start, end))
            start = end
        return cls(text, tuple(token_ids), tuple(places))

    def placed(self, logprobs: Sequence[TokenLogprob]) -> tuple[PlacedToken, ...]:
        """Its tokens with their log-probabilities; ``logprobs`` are those of all but the first."""
        every = (TokenLogprob(self.token_ids[0], math.nan, False), *logprobs)
        return tuple(PlacedToken(logprob, *place) for logprob, place in zip(every, self.places, strict=True))


async def echoed(
    deltas: AsyncIterator[tuple[int, TextDelta]], prompts: Sequence[EchoedPrompt], has_logprobs: bool
) -> AsyncIterator[tuple[int, TextDelta]]:
    """The deltas of all choices, the first of each with its prompt in front; ``prompts`` has one for each choice."""
    begun: set[int] = set()
    placed: dict[int, tuple[PlacedToken, ...]] = {}  # by the identity of the prompt, which its choices share
    async for index, delta in deltas:
        prompt = prompts[index]
        num_chars = len(prompt.text)
        tokens = tuple(replace(own, start=own.start + num_chars, end=own.end + num_chars) for own in delta.tokens)
        if index in begun:
            yield index, replace(delta, tokens=tokens)
            continue
        begun.add(index)
        if has_logprobs and id(prompt) not in placed:
            placed[id(prompt)] = prompt.placed(delta.prompt_logprobs)
        tokens = placed.get(id(prompt), ()) + tokens
        yield index, replace(delta, text=prompt.text + delta.text, tokens=tokens)
