"""``echo``: prompts in front of what continues them, with log-probabilities of both."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from quantpipe.engine.request import TokenLogprob
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.serve.echo import EchoedPrompt, echoed
from quantpipe.serve.generation import TextDelta

Server = Any
COMPLETIONS = "/v1/completions"


def test_prompt_stands_before_its_continuation_streamed_or_not(server: Server) -> None:
    body = dict(model="echo", prompt=["Grüße", "🔑"], n=2, echo=True)
    whole = [choice["text"] for choice in server.post(COMPLETIONS, **body).json()["choices"]]
    assert whole == ["GrüßeGrüße"] * 2 + ["🔑🔑"] * 2
    texts = [""] * 4
    for line in server.post(COMPLETIONS, **body, stream=True).text.split("\n\n")[:-2]:
        [choice] = json.loads(line.removeprefix("data: "))["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == whole


def test_token_ids_come_back_as_text_and_stop_strings_are_sought_behind_the_prompt(
    server: Server, tokenizer: Tokenizer
) -> None:
    prompt_ids = tokenizer.encode("ABC", add_special_tokens=True)
    reply = server.post(COMPLETIONS, model="echo", prompt=prompt_ids, echo=True, stop="C").json()
    assert reply["choices"][0]["text"] == "ABCAB"


def test_every_token_has_its_log_probability_but_the_first(server: Server) -> None:
    for stream in (False, True):
        reply = server.post(COMPLETIONS, model="echo", prompt="héy", echo=True, logprobs=2, max_tokens=3, stream=stream)
        lines = reply.text.split("\n\n")[:-2] if stream else [reply.text]
        parts = [json.loads(line.removeprefix("data: "))["choices"][0]["logprobs"] for line in lines]
        joined = {name: [entry for part in parts for entry in part[name]] for name in parts[0]}
        assert joined["tokens"][:2] == ["<s>", "h"] and len(joined["tokens"]) == 5 + 3
        assert joined["token_logprobs"] == [None] + [-0.5] * 7
        assert joined["top_logprobs"][0] is None and len(joined["top_logprobs"][1]) == 2
        assert joined["text_offset"] == [0, 0, 1, 1, 2, 3, 4, 4]


def test_prompt_can_be_scored_without_a_new_token(server: Server, tokenizer: Tokenizer) -> None:
    body = dict(model="echo", prompt=tokenizer.encode("ABC"), echo=True, logprobs=0)
    reply = server.post(COMPLETIONS, **body, max_tokens=0).json()
    [choice] = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ABC", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert reply["usage"]["completion_tokens"] == 0
    assert server.engine.seen_params[-1].prompt_logprobs == 0


def test_prompts_are_scored_only_where_log_probabilities_are_asked_for(server: Server) -> None:
    server.post(COMPLETIONS, model="echo", prompt="a", echo=True)
    assert server.engine.seen_params[-1].prompt_logprobs is None
    server.post(COMPLETIONS, model="echo", prompt="a", logprobs=1)
    assert server.engine.seen_params[-1].prompt_logprobs is None


def test_later_deltas_are_moved_behind_the_prompt(tokenizer: Tokenizer) -> None:
    prompt = EchoedPrompt.of(tokenizer, "AB", tokenizer.encode("AB"))
    logprobs = (TokenLogprob(66, -1.5, True),)

    async def deltas() -> AsyncIterator[tuple[int, TextDelta]]:
        yield 0, TextDelta("", (), 0, None, prompt_logprobs=logprobs)
        yield 0, TextDelta("C", (), 1, "stop")
        yield 1, TextDelta("D", (), 1, "stop")

    async def collect() -> list[tuple[int, str, int]]:
        return [(index, own.text, len(own.tokens)) async for index, own in echoed(deltas(), [prompt, prompt], True)]

    assert asyncio.run(collect()) == [(0, "AB", 2), (0, "C", 0), (1, "ABD", 2)]
