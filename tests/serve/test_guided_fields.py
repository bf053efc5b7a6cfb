"""Text of a given form over the API: a real engine on the trained model, and every way to ask."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.guided.compiler import GrammarCompiler

Server = Any
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Zürich", "Genève"]}, "size": {"type": "integer", "maximum": 999}},
    "required": ["city", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def guided(tiny_llama: Path, run_real: Any) -> Iterator[Server]:
    """The trained model, served."""
    config = EngineConfig(backend="torch", num_threads=1, max_num_seqs=8, speculative="ngram")
    engine, tokenizer = Engine.open(tiny_llama, config), Tokenizer.open(tiny_llama)
    engine.compiler = GrammarCompiler(tokenizer, engine.description.vocab_size, engine.description.eos_token_ids)
    with run_real(engine, tokenizer) as server:
        yield server


def texts(server: Server, **body: Any) -> list[str]:
    response = server.post(COMPLETIONS, **{"model": "echo", "prompt": "The", "max_tokens": 200} | body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [choice["text"] for choice in choices]


REGEX = "(red|blue) (fox|owl){1,3}"
FORMS: list[dict[str, Any]] = [
    {"guided_regex": REGEX},
    {"structured_outputs": {"regex": REGEX}},
    {"guided_choice": ["red fox", "blue owl", "red owl"]},
    {"structured_outputs": {"choice": ["red fox", "blue owl", "red owl"]}},
]


@pytest.mark.parametrize("form", FORMS, ids=repr)
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_every_choice_is_of_the_form(guided: Server, form: dict[str, Any], temperature: float) -> None:
    found = texts(guided, **form, n=6, temperature=temperature, seed=1)
    assert [text for text in found if not re.fullmatch(REGEX, text)] == []
    assert (len(set(found)) > 1) == (temperature > 0)


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}},
        {"structured_outputs": {"json": CITY}},
        {"structured_outputs": {"json": json.dumps(CITY)}},
        {"guided_json": CITY},
        {"guided_json": json.dumps(CITY)},
    ],
    ids=lambda form: str(form)[:30],
)
def test_json_of_a_schema_can_be_parsed_and_holds_what_it_must(guided: Server, form: dict[str, Any]) -> None:
    for text in texts(guided, **form, n=3, temperature=1.0, seed=2):
        reply = json.loads(text)
        assert reply["city"] in CITY["properties"]["city"]["enum"]  # type: ignore[index]
        assert reply["size"] <= 999


@pytest.mark.parametrize("form", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}])
def test_any_json_begins_like_json_and_is_cut_by_max_tokens(guided: Server, form: dict[str, Any]) -> None:
    body = dict(model="echo", messages=USER, response_format=form, max_tokens=1, seed=3)
    choice = guided.post(CHAT, **body).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert re.match(r'[{\["\d\-tfn]', choice["message"]["content"])


def test_stream_equals_the_whole_text_with_every_other_parameter(guided: Server) -> None:
    body = dict(model="echo", messages=USER, guided_json=CITY, n=2, seed=5, min_tokens=40, frequency_penalty=1.0)
    whole = guided.post(CHAT, **body, logprobs=True, top_logprobs=2)
    assert whole.status_code == 200, whole.text
    streamed = ["", ""]
    for line in guided.post(CHAT, **body, stream=True).text.split("\n\n")[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "")
    assert [choice["message"]["content"] for choice in whole.json()["choices"]] == streamed
    assert all(json.loads(text)["size"] <= 999 for text in streamed)


def test_prompts_of_one_request_share_the_form_and_free_text_runs_beside(guided: Server) -> None:
    found = texts(guided, prompt=["A", "The owl"], guided_choice=["yes", "no"], temperature=1.0, seed=1, n=2)
    assert set(found) <= {"yes", "no"} and len(found) == 4
    assert guided.post(COMPLETIONS, model="echo", prompt="The", max_tokens=5).status_code == 200


def test_openai_client_parses_a_schema_of_its_own(guided: Server) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        city: str
        size: int

    client = openai.OpenAI(base_url=f"{guided.url}/v1", api_key="none", max_retries=0, timeout=20)
    messages: Any = USER
    schema = City.model_json_schema() | {"additionalProperties": False}  # as OpenAI's strict mode asks
    schema["properties"]["city"]["maxLength"] = 8
    schema["properties"]["size"] |= {"minimum": 0, "maximum": 99}
    form: Any = {"type": "json_schema", "json_schema": {"name": "City", "schema": schema, "strict": True}}
    reply = client.chat.completions.create(model="echo", messages=messages, response_format=form, temperature=0)
    assert 0 <= City.model_validate_json(reply.choices[0].message.content or "").size <= 99


BAD_FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_regex": "(("}, "guided_regex", "unclosed group"),
    ({"guided_regex": ""}, "guided_regex", "at least 1"),
    ({"guided_regex": 5}, "guided_regex", "string"),
    ({"guided_regex": "a" * 70_000}, "guided_regex", "70,000 characters are too many"),
    ({"guided_choice": []}, "guided_choice", "at least 1 item"),
    ({"guided_choice": [""]}, "guided_choice.0", "at least 1"),
    ({"guided_choice": ["a"] * 1001}, "guided_choice", "at most 1000"),
    ({"guided_json": "{"}, "guided_json", "JSON schema"),
    ({"guided_json": "5"}, "guided_json", "JSON schema"),
    ({"guided_json": {"type": "objekt"}}, "guided_json", "objekt"),
    ({"guided_json": {"uniqueItems": True}}, "guided_json", "uniqueItems"),
    ({"guided_grammar": "root ::= 'a'"}, "guided_grammar", "not served"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"grammar": "a"}}, "grammar", "not served"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "not permitted"),
    ({"structured_outputs": {"regex": "(("}}, "structured_outputs", "unclosed group"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {}}, "response_format.type", "required"),
    ({"response_format": "json_object"}, "response_format", "valid dictionary or object"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema.schema"),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "cannot be joined"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ends with an end-of-sequence token"),
]


@pytest.mark.parametrize(("form", "param", "message"), BAD_FORMS, ids=lambda part: str(part)[:50])
def test_form_that_cannot_be_obeyed_is_a_400_and_the_next_request_works(
    guided: Server, form: dict[str, Any], param: str, message: str
) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
        response = guided.post(path, model="echo", max_tokens=4, **prompt, **form)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param and message in error["message"]
        assert "\n" not in error["message"] and len(error["message"]) < 600
    assert texts(guided, guided_choice=["yes"]) == ["yes"]


def test_schema_nested_too_deeply_is_a_400(guided: Server) -> None:
    for depth in (200, 900):
        nested = '{"items":' * depth + "{}" + "}" * depth
        body = '{"model": "echo", "prompt": "a", "guided_json": ' + nested + "}"
        response = guided.http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, response.text
    assert texts(guided, guided_choice=["yes"]) == ["yes"]


def test_many_samples_of_a_form_that_repeats_itself_are_guessed_ahead(guided: Server) -> None:
    found = texts(guided, guided_regex="(na na na na na ){20}", n=2, temperature=0, max_tokens=400)
    assert set(found) == {"na na na na na " * 20}
    text = guided.http.get("/metrics").text
    name = "quantpipe:spec_decode_num_draft_tokens_total"
    assert float(next(line for line in text.splitlines() if line.startswith(name)).split()[1]) > 0
