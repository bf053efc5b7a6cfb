"""``/tokenize`` and ``/detokenize`` over a real socket, in vLLM's shapes."""

import json
from typing import Any

import pytest

Server = Any
BOS, EOS = 256, 257


def test_text_becomes_the_tokens_that_completions_would_read(server: Server) -> None:
    reply = server.post("/tokenize", model="echo", prompt="Aé").json()
    ids = reply["tokens"]
    assert reply == {"count": 4, "max_model_len": 512, "tokens": ids, "token_strs": None}
    assert ids[0] == BOS
    server.post("/v1/completions", model="echo", prompt="Aé")
    assert list(server.engine.seen_prompts[-1]) == ids
    assert server.post("/tokenize", prompt="Aé", add_special_tokens=False).json()["tokens"] == ids[1:]
    assert server.post("/tokenize", prompt="").json()["tokens"] == [BOS]


def test_conversation_becomes_the_tokens_that_chat_would_read(server: Server) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = server.post("/tokenize", model="echo", messages=messages).json()["tokens"]
    server.post("/v1/chat/completions", model="echo", messages=messages)
    assert list(server.engine.seen_prompts[-1]) == ids
    assert ids.count(BOS) == 1
    without = server.post("/tokenize", messages=messages, add_generation_prompt=False).json()["tokens"]
    assert len(without) == len(ids) - len("assistant:")


def test_names_of_tokens_are_those_of_the_vocabulary(server: Server) -> None:
    reply = server.post("/tokenize", prompt="a b", return_token_strs=True).json()
    assert reply["token_strs"] == ["<s>", "a", "Ġ", "b"]


def test_tokens_become_text_again_with_special_ones_shown(server: Server) -> None:
    ids = server.post("/tokenize", prompt="Grüße 🔑").json()["tokens"]
    assert server.post("/detokenize", model="echo", tokens=[*ids, EOS]).json() == {"prompt": "<s>Grüße 🔑</s>"}
    assert server.post("/detokenize", tokens=[]).json() == {"prompt": ""}
    assert server.post("/detokenize", tokens=ids[-1:]).json() == {"prompt": "\ufffd"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**32]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
    ids=repr,
)
def test_what_is_no_text_or_no_token_is_refused_by_name(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    content = json.dumps(body)
    response = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
def test_other_models_are_404_and_unknown_fields_are_named(server: Server, path: str, body: dict[str, Any]) -> None:
    assert server.post(path, model="gpt-9", **body).status_code == 404
    assert server.post(path, colour="red", **body).headers["quantpipe-ignored"] == "colour"
