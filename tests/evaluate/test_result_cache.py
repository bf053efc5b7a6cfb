"""Answers are used again only where nothing that they depend on has changed."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from quantpipe.evaluate import result_cache
from quantpipe.evaluate.result_cache import Asked, code_digest, run_suite_once, tokenizer_digest
from quantpipe.evaluate.suite import load_suite
from tests.evaluate.conftest import BigramEngine, CharCodec
from tests.evaluate.test_short_run import CHOICE, EXACT, ROWS, knowing_engine
from tests.evaluate.test_short_task import write_suite

ASKED = Asked("model", "tokenizer", "suite", "code", {"backend": "cpu", "kv_dtype": "auto"})


def ask(folder: Path, codec: CharCodec, asked: Asked = ASKED) -> tuple[Any, bool, BigramEngine]:
    engine, suite = knowing_engine(), load_suite(write_suite(folder, CHOICE, EXACT, rows=ROWS))
    result, was_found = run_suite_once(engine, codec, suite, asked, folder / "cache")
    return result, was_found, engine


def test_the_same_model_engine_and_suite_are_asked_once(tmp_path: Path, codec: CharCodec) -> None:
    first, was_found, engine = ask(tmp_path, codec)
    assert not was_found and engine.calls
    second, was_found, engine = ask(tmp_path, codec)
    assert was_found and engine.calls == []
    assert second == first


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "other"},
        {"tokenizer": "other"},
        {"suite": "other"},
        {"code": "other"},
        {"settings": {"backend": "reference", "kv_dtype": "auto"}},
        {"settings": {"backend": "cpu", "kv_dtype": "int8"}},
    ],
)
def test_a_change_of_anything_asks_anew(tmp_path: Path, codec: CharCodec, changed: dict[str, Any]) -> None:
    ask(tmp_path, codec)
    assert not ask(tmp_path, codec, dataclasses.replace(ASKED, **changed))[1]


def test_every_ingredient_is_in_the_key() -> None:
    assert {field.name for field in dataclasses.fields(Asked)} == {"model", "tokenizer", "suite", "code", "settings"}


def test_a_damaged_file_is_asked_for_again(tmp_path: Path, codec: CharCodec) -> None:
    ask(tmp_path, codec)
    [file] = (tmp_path / "cache").iterdir()
    file.write_text(file.read_text()[:-40])
    assert not ask(tmp_path, codec)[1]
    assert ask(tmp_path, codec)[1]


def test_the_tokenizers_digest_changes_with_its_template(tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_llama, folder)
    before = tokenizer_digest(folder)
    assert before == tokenizer_digest(tiny_llama)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert tokenizer_digest(folder) != before


def test_the_code_s_digest_changes_with_a_source_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    source = package / "inner" / "kernel.cpp"
    source.write_text("int a;")
    monkeypatch.setattr(result_cache.quantpipe, "__file__", str(package / "__init__.py"))
    before = code_digest.__wrapped__()
    source.write_text("int b;")
    assert code_digest.__wrapped__() != before
