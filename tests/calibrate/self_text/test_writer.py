"""What the tiny trained model writes: a chat model both sides of a conversation, any other plain text."""

from dataclasses import replace
from pathlib import Path

import pytest

from quantpipe.calibrate.self_text.writer import Writer
from quantpipe.calibration.samples.self_text import SelfTextRequest
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import DataError

REQUEST = SelfTextRequest(num_samples=6, max_tokens=40, temperature=0.8, top_p=0.95, openers=(), seed=0)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Engine:
    return Engine.open(tiny_llama, EngineConfig(num_threads=1))


@pytest.fixture(scope="module")
def chat(engine: Engine, tiny_llama: Path) -> Writer:
    return Writer(engine, Tokenizer.open(tiny_llama))


@pytest.fixture(scope="module")
def plain(engine: Engine, tiny_llama: Path) -> Writer:
    tokenizer = Tokenizer.open(tiny_llama)
    tokenizer.chat_template = None
    return Writer(engine, tokenizer)


def test_a_chat_model_asks_and_answers_itself(chat: Writer) -> None:
    written = [text.content for text in chat.write(REQUEST, range(6))]
    whole = [content for content in written if content]
    assert len(whole) >= 4  # it may fall silent now and then
    for content in whole:
        assert not isinstance(content, str)
        assert [message["role"] for message in content] == ["user", "assistant"]
        assert all(message["content"].strip() for message in content)
        assert "<|im_" not in str(content)
    assert len({str(content) for content in whole}) == len(whole)


def test_a_model_without_template_goes_on_from_the_beginning_of_text(plain: Writer) -> None:
    written = [text.content for text in plain.write(REQUEST, range(6))]
    assert all(isinstance(content, str) for content in written)
    assert len(set(written)) == 6


def test_a_sample_does_not_depend_on_the_others(chat: Writer) -> None:
    together = chat.write(REQUEST, range(6))
    assert [*chat.write(REQUEST, range(2, 3)), *chat.write(REQUEST, range(5, 6))] == [together[2], together[5]]


def test_another_seed_writes_other_texts(plain: Writer) -> None:
    assert plain.write(REQUEST, range(2)) == plain.write(REQUEST, range(2))
    assert plain.write(REQUEST, range(2)) != plain.write(replace(REQUEST, seed=1), range(2))


@pytest.mark.parametrize("kind", ["chat", "plain"])
def test_openers_take_turns_and_name_the_language(kind: str, chat: Writer, plain: Writer) -> None:
    request = replace(REQUEST, openers=(("en", "What is the"), ("python", "def ")))
    written = (chat if kind == "chat" else plain).write(request, range(4))
    assert [text.language for text in written] == ["en", "python", "en", "python"]
    for text, beginning in zip(written, ["What is the", "def "] * 2, strict=True):
        if text.content:
            start = text.content if isinstance(text.content, str) else text.content[0]["content"]
            assert start.startswith(beginning.strip())


def test_no_sample_is_longer_than_asked(plain: Writer, tiny_llama: Path) -> None:
    tokenizer = Tokenizer.open(tiny_llama)
    for text in plain.write(replace(REQUEST, max_tokens=8), range(6)):
        assert isinstance(text.content, str)
        assert len(tokenizer.encode(text.content)) <= 8


def test_a_model_with_nothing_to_begin_with_needs_openers(engine: Engine, tiny_llama: Path) -> None:
    tokenizer = Tokenizer.open(tiny_llama)
    tokenizer.chat_template, tokenizer.special_tokens = None, {}
    with pytest.raises(DataError, match="no BOS or EOS to begin a text with; give openers"):
        Writer(engine, tokenizer).write(REQUEST, range(1))
