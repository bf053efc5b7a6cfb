"""Texts of its own that a model wrote are kept, found again, redacted, and never half a line."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quantpipe.calibrate.self_text.own_texts import KeptTexts, OwnTexts, own_texts
from quantpipe.calibration.samples.self_text import SelfTextRequest, WrittenText
from quantpipe.engine.config import EngineConfig
from quantpipe.errors import DataError
from quantpipe.report import Reporter
from quantpipe.sources.base_model import BaseModel

REQUEST = SelfTextRequest(num_samples=4, max_tokens=24, temperature=0.8, top_p=0.95, openers=(), seed=0)
MakeTexts = Callable[..., OwnTexts]


@pytest.fixture
def make_texts(tiny_llama: Path, tmp_path: Path, quiet: Reporter) -> MakeTexts:
    def make(redact: Callable[[str], str] = str, folder: Path = tiny_llama, digest: str = "0" * 64) -> OwnTexts:
        base = BaseModel(folder, "tiny", digest, is_dequantized=False)
        return OwnTexts(base, EngineConfig(num_threads=1), tmp_path / "texts", redact, quiet)

    return make


def test_texts_that_were_kept_are_not_written_again(make_texts: MakeTexts, tmp_path: Path) -> None:
    first = list(make_texts()(REQUEST))
    assert len(first) == 4
    gone = tmp_path / "gone"  # no model can be opened there
    assert list(make_texts(folder=gone)(REQUEST)) == first


def test_a_run_that_was_cut_off_goes_on_and_ends_with_the_same_texts(make_texts: MakeTexts, tmp_path: Path) -> None:
    texts = make_texts()
    first = list(texts(REQUEST))
    path = tmp_path / "texts" / f"{texts.key(REQUEST)}.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:7])
    assert list(make_texts()(REQUEST)) == first
    assert path.read_bytes() == whole


def test_more_texts_are_added_to_those_that_were_kept(make_texts: MakeTexts) -> None:
    few = list(make_texts()(REQUEST))
    more = list(make_texts()(replace(REQUEST, num_samples=6)))
    assert len(more) == 6 and more[:4] == few


def test_another_model_seed_or_length_has_texts_of_its_own(make_texts: MakeTexts) -> None:
    keys = [
        make_texts().key(REQUEST),
        make_texts(digest="1" * 64).key(REQUEST),
        make_texts().key(replace(REQUEST, seed=1)),
        make_texts().key(replace(REQUEST, max_tokens=25)),
        make_texts().key(replace(REQUEST, openers=(("en", "A"),))),
    ]
    assert len(set(keys)) == len(keys)


def test_texts_are_redacted_before_they_are_kept(make_texts: MakeTexts, tmp_path: Path) -> None:
    written = list(make_texts(redact=lambda text: text.replace("e", "#"))(REQUEST))
    (path,) = (tmp_path / "texts").iterdir()
    contents = [json.loads(line)["content"] for line in path.read_text(encoding="utf-8").splitlines()]
    said = "".join(content if isinstance(content, str) else content[-1]["content"] for content in contents if content)
    assert "#" in said and "e" not in said
    assert "#" in str(written)


def test_a_damaged_file_is_refused_without_its_text(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    path.write_text('{"content": "secret words"}\n')
    with pytest.raises(DataError, match="not what was written there; remove it") as refused:
        KeptTexts(path).read()
    assert "secret" not in str(refused.value)


def test_conversations_and_texts_are_read_as_they_were_kept(tmp_path: Path) -> None:
    texts = [
        WrittenText("你好\nthere", "zh"),
        WrittenText(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}), "en"),
        WrittenText((), "und"),
    ]
    kept = KeptTexts(tmp_path / "new" / "kept.jsonl")
    kept.append(texts[:1])
    kept.append(texts[1:])
    assert kept.read() == texts


def test_what_a_model_repeats_from_its_training_is_redacted(tiny_llama: Path, tmp_path: Path, quiet: Reporter) -> None:
    base = BaseModel(tiny_llama, "tiny", "0" * 64, is_dequantized=False)
    texts = own_texts(base, EngineConfig(num_threads=1), tmp_path, quiet)
    assert texts.redact("write to jo@example.com").startswith("write to <EMAIL_")
    assert texts.folder.parent == tmp_path
