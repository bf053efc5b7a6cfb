"""Tools over the API: what the model is shown, what it may and must call, and what clients get, streamed or not."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.guided.compiler import GrammarCompiler

Server = Any
RunReal = Callable[..., AbstractContextManager[Server]]
CHAT = "/v1/chat/completions"
# The echo engine answers with its prompt: the last turn alone, so that a test says what is answered.
LAST = '{{ bos_token }}{{ messages[-1].content }}{# <tool_call> "arguments" #}{% if tools %}{% endif %}'
SHOWN = '{{ bos_token }}{{ tools | tojson }}{{ messages | tojson }}{# <tool_call> "arguments" #}'
LLAMA = '{{ bos_token }}{{ messages[-1].content }}{# <|start_header_id|> "parameters" #}{% if tools %}{% endif %}'
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    return Tokenizer(tokenizer._core, tokenizer.special_tokens, template)


@pytest.fixture
def start(run_real: RunReal, tokenizer: Tokenizer, make_engine: Any) -> Iterator[Callable[[str], Server]]:
    """``start(template)``: an echo server with that chat template."""
    with ExitStack() as stack:

        def start_one(template: str) -> Server:
            engine = make_engine()
            engine.max_model_len = 4096
            return stack.enter_context(run_real(engine, with_template(tokenizer, template)))

        yield start_one


def ask(server: Server, content: str, **body: Any) -> dict[str, Any]:
    """The one choice of the whole reply, which that of the stream must equal, but for the calls' names."""
    messages = [{"role": "user", "content": content}]
    asked = {"model": "echo", "messages": messages, "tools": [WEATHER, NOW]} | body
    response = server.post(CHAT, **asked)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    streamed = collect(server.post(CHAT, **asked, stream=True))
    assert (streamed["content"] or None) == (choice["message"]["content"] or None)
    assert without_ids(streamed["tool_calls"]) == without_ids(choice["message"].get("tool_calls", []))
    assert streamed["finish_reason"] == choice["finish_reason"]
    assert isinstance(choice, dict)
    return choice


def collect(response: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"content": "", "tool_calls": [], "finish_reason": None}
    for line in response.text.split("\n\n")[:-2]:
        [choice] = json.loads(line.removeprefix("data: "))["choices"]
        found["content"] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", []):
            assert call.pop("index") == len(found["tool_calls"])
            found["tool_calls"].append(call)
        found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
    return found


def without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert len({call["id"] for call in calls}) == len(calls)
    return [{"type": call["type"], "function": call["function"]} for call in calls]


def test_call_is_handed_out_in_place_of_its_text(start: Callable[[str], Server]) -> None:
    choice = ask(start(LAST), "Let me see. " + CALL)
    assert choice["message"]["content"] == "Let me see."
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Zürich"}'}
    assert call["id"].startswith("call_")


def test_answer_of_calls_alone_has_no_content(start: Callable[[str], Server]) -> None:
    server = start(LAST)
    choice = ask(server, CALL + "\n" + CALL)
    assert choice["message"]["content"] is None and len(choice["message"]["tool_calls"]) == 2
    choice = ask(server, CALL + "\n" + CALL, parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1


def test_text_that_is_no_call_stays_text(start: Callable[[str], Server]) -> None:
    server = start(LAST)
    for text in ("plain", CALL.replace("weather", "other"), CALL.replace('"Zürich"}', "")):
        choice = ask(server, text)
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        assert "tool_calls" not in choice["message"]


def test_call_that_max_tokens_cuts_is_text_and_says_length(start: Callable[[str], Server]) -> None:
    choice = ask(start(LAST), CALL, max_tokens=20)
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL[:20], "length")


def test_without_tools_or_with_choice_none_calls_are_text_like_any_other(start: Callable[[str], Server]) -> None:
    server = start(LAST)
    for body in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        choice = ask(server, CALL, **body)
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


def test_llama_answers_with_its_own_form(start: Callable[[str], Server]) -> None:
    server = start(LLAMA)
    choice = ask(server, '{"name": "now", "parameters": {}}')
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]
    assert ask(server, '{"answer": 1}')["message"]["content"] == '{"answer": 1}'


def test_every_token_keeps_its_log_probability(start: Callable[[str], Server]) -> None:
    messages = [{"role": "user", "content": "See " + CALL}]
    body = dict(model="echo", messages=messages, tools=[WEATHER], logprobs=True)
    server = start(LAST)
    whole = server.post(CHAT, **body).json()["choices"][0]["logprobs"]["content"]
    streamed: list[Any] = []
    for line in server.post(CHAT, **body, stream=True).text.split("\n\n")[:-2]:
        streamed += (json.loads(line.removeprefix("data: "))["choices"][0]["logprobs"] or {"content": []})["content"]
    assert streamed == whole and len(whole) == len(("See " + CALL).encode()) + 1  # and the end


def test_template_is_shown_tools_and_calls_as_objects(start: Callable[[str], Server]) -> None:
    messages = [
        {"role": "user", "content": "And now?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}},
                {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "no JSON"}, "index": 1},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
    ]
    response = start(SHOWN).post(CHAT, model="echo", messages=messages, tools=[WEATHER])
    text = response.json()["choices"][0]["message"]["content"]
    decoder = json.JSONDecoder()
    tools, end = decoder.raw_decode(text)
    assert tools == [WEATHER]
    shown = text[end:]
    assert '"arguments": {"city": "Bern"}' in shown and '"arguments": "no JSON"' in shown
    assert '{"role": "tool", "content": "rain", "tool_call_id": "call_1"}' in shown
    assert '{"role": "assistant", "content": "", "tool_calls"' in shown


def tool_of(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "a", "parameters": parameters}}


BAD_TOOLS: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "retrieval"}]}, "tools.0", "function"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools.0.function.name", "pattern"),
    ({"tools": [tool_of([])]}, "tools.0.function", "dictionary"),
    ({"tools": [tool_of({"type": "string"})]}, "tools.0.function", "type object"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "'weather' twice"),
    ({"tools": [NOW] * 129}, "tools", "128"),
    ({"tools": "weather"}, "tools", "list"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", "required"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice", "'now'"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice", "required"),
    ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format", "no room for calls"),
    ({"tools": [WEATHER], "parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
    ({"tools": [tool_of({"properties": {"b": {"not": {}}}})], "tool_choice": "required"}, "tools", "not"),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD_TOOLS, ids=lambda part: str(part)[:60])
def test_tools_of_another_shape_are_refused(
    start: Callable[[str], Server], body: dict[str, Any], param: str, message: str
) -> None:
    server = start(LAST)
    response = server.post(CHAT, model="echo", messages=[{"role": "user", "content": "a"}], **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert str(error["param"]).startswith(param) and message in error["message"], error
    assert "\n" not in error["message"]
    assert ask(server, CALL)["finish_reason"] == "tool_calls"


def test_infinite_numbers_in_a_schema_are_refused_where_it_must_be_obeyed(start: Callable[[str], Server]) -> None:
    tools = json.dumps([tool_of({"properties": {"b": {"maximum": 0}}})]).replace(": 0", ": 1e999")
    body = '{"model": "echo", "messages": [{"role": "user", "content": "a"}], "tool_choice": "required", "tools": '
    body += tools + "}"
    response = start(LAST).http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "tool"}], "messages.0"),
        ([{"role": "assistant", "content": None}], "messages.0"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages.0"),
        (
            [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "a", "arguments": ""}}]}],
            "messages.0",
        ),
        ([{"role": "user", "content": "a", "tool_call_id": "1"}], "messages.0"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages.0.tool_calls.0.function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": {}}}]}],
            "messages.0.tool_calls",
        ),
    ],
)
def test_turns_of_another_shape_are_refused(server: Server, messages: list[Any], param: str) -> None:
    response = server.post(CHAT, model="echo", messages=messages)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ bos_token }}{{ messages[-1].content }}", "the model's chat template knows none"),
        ("{{ bos_token }}[TOOLS]{{ tools | tojson }}{{ messages[-1].content }}", "--tool-parser (hermes, llama3)"),
    ],
)
def test_model_that_knows_no_tools_says_so(start: Callable[[str], Server], template: str, message: str) -> None:
    server, messages = start(template), [{"role": "user", "content": "a"}]
    response = server.post(CHAT, model="echo", messages=messages, tools=[WEATHER])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert message in response.json()["error"]["message"]
    assert server.post(CHAT, model="echo", messages=messages, tools=[WEATHER], tool_choice="none").status_code == 200


def marked(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """With the marks of calls as special tokens, in place of the last two of the vocabulary."""
    content = json.loads(tokenizer.to_json())
    vocab, marks = content["model"]["vocab"], ("<tool_call>", "</tool_call>")
    for mark, name in zip(marks, sorted(vocab, key=vocab.__getitem__)[-2:], strict=True):
        special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        content["added_tokens"].append({"id": vocab.pop(name), "content": mark} | special)
        content["model"]["merges"] = [pair for pair in content["model"]["merges"] if "".join(pair) != name]
    vocab |= {entry["content"]: entry["id"] for entry in content["added_tokens"][-2:]}
    return tokenizers.Tokenizer.from_str(json.dumps(content))


@pytest.fixture(scope="module", params=["hermes", "llama3", "hermes, marks as tokens"])
def trained(request: pytest.FixtureRequest, tiny_llama: Path, run_real: RunReal) -> Iterator[Server]:
    """The trained model, which knows nothing of tools, behind a template of each format."""
    engine = Engine.open(tiny_llama, EngineConfig(backend="torch", num_threads=1, max_num_seqs=8))
    template = "{{ tools | tojson }}" + (LLAMA if request.param == "llama3" else LAST)
    tokenizer = Tokenizer.open(tiny_llama)
    if request.param == "hermes, marks as tokens":
        tokenizer = Tokenizer(marked(tokenizer), tokenizer.special_tokens)
        assert tokenizer.is_special("<tool_call>")
    tokenizer = with_template(tokenizer, template)
    engine.compiler = GrammarCompiler(tokenizer, engine.description.vocab_size, engine.description.eos_token_ids)
    with run_real(engine, tokenizer) as server:
        yield server


CHOICES: list[Any] = ["required", {"type": "function", "function": {"name": "weather"}}]


@pytest.mark.parametrize("choice", CHOICES, ids=["required", "named"])
@pytest.mark.parametrize("stream", [True, False])
def test_forced_calls_are_made_and_their_arguments_fit(trained: Server, choice: Any, stream: bool) -> None:
    client = openai.OpenAI(base_url=f"{trained.url}/v1", api_key="none", max_retries=0, timeout=20)
    names = set()
    for seed in range(4):
        asked: dict[str, Any] = dict(model="echo", messages=[{"role": "user", "content": "Go"}], max_tokens=150)
        asked |= dict(tools=[WEATHER, NOW], tool_choice=choice, parallel_tool_calls=False, seed=seed)
        if stream:
            calls: list[Any] = []
            chunks = list(client.chat.completions.create(**asked, stream=True))
            for chunk in chunks:
                calls += chunk.choices[0].delta.tool_calls or []
                assert not chunk.choices[0].delta.content
            reason = chunks[-1].choices[0].finish_reason
        else:
            whole = client.chat.completions.create(**asked)
            calls, reason = whole.choices[0].message.tool_calls or [], whole.choices[0].finish_reason
            assert whole.choices[0].message.content is None
        [call] = calls
        assert reason == "tool_calls"
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == ({"city"} if call.function.name == "weather" else set())
        names.add(call.function.name)
    assert names == {"weather"} if choice != "required" else names <= {"weather", "now"}


def test_required_calls_may_be_several_and_every_choice_makes_some(trained: Server) -> None:
    body = dict(model="echo", messages=[{"role": "user", "content": "Go"}], tools=[NOW], tool_choice="required")
    response = trained.post(CHAT, **body, n=6, seed=1, max_tokens=300)
    for choice in response.json()["choices"]:
        assert len(choice["message"]["tool_calls"]) >= 1
