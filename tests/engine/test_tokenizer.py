"""Encoding adds nothing, and a stream of pieces is the decoded whole, for byte-level and metaspace tokenizers."""

import json
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from quantpipe.engine.tokenizer import REPLACEMENT, Tokenizer
from quantpipe.errors import ArtifactError, RequestError

TEXTS = [
    "Hello world, this is  a test.\n\n  indented\ttext ",
    "量化后的模型应当保持精度，客服回答要准确。",
    "한국어 조합과 ㅎㅏㄴ",
    "thumbs 👍🏽 family 👨‍👩‍👧‍👦 flag 🇪🇺 heart ❤️ llama 🦙🦙🦙",
    "naïve café e\u0301 \u00a0 \u200b end",
    " leading space",
    "",
    "▁ metaspace itself",
    "a literal \ufffd stays",
]


def byte_level() -> tokenizers.Tokenizer:
    """256 bytes and a few merges of English: every other character is split over tokens."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator([TEXTS[0]] * 3, trainer)
    return core


def metaspace() -> tokenizers.Tokenizer:
    """As Llama 2: spaces are ▁, unknown characters fall back to <0x..> bytes, and one leading space is stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyzH.,", "量", "化", "\n"]
    merges = [("▁", "t"), ("▁t", "e"), ("▁", "w"), ("o", "r"), ("▁w", "or"), ("▁", "▁")]
    pieces += [left + right for left, right in merges]
    core = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges, unk_token="<unk>", byte_fallback=True
        )
    )
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    core.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return core


BYTE_LEVEL = Tokenizer(byte_level())
KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {"byte_level": byte_level, "metaspace": metaspace}


@pytest.fixture(scope="module", params=sorted(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(KINDS[request.param]())


@pytest.mark.parametrize("text", TEXTS)
def test_stream_gives_the_text_without_splitting_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    pieces = [stream.push([token_id]) for token_id in ids]
    if "\ufffd" not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)
    whole = "".join([*pieces, stream.finish()])
    assert whole == tokenizer.decode(ids)
    assert whole.replace("▁", " ") == text.replace("▁", " ")  # metaspace cannot tell ▁ from a space


def test_each_character_comes_with_its_last_token(tokenizer: Tokenizer) -> None:
    text = "abc 你好🦙"
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    shown = ""
    for count, token_id in enumerate(ids, start=1):
        shown += stream.push([token_id])
        assert shown == tokenizer.decode(ids[:count]).rstrip(REPLACEMENT)
    assert shown == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 293), max_size=40), st.lists(st.integers(1, 5), min_size=1), st.booleans())
def test_any_ids_in_any_pieces_stream_to_their_decoding(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip_special_tokens: bool
) -> None:
    stream = tokenizer.stream(skip_special_tokens)
    shown, rest = "", list(ids)
    for size in sizes * 40:
        shown += stream.push(rest[:size])
        rest = rest[size:]
    assert shown + stream.finish() == tokenizer.decode(ids, skip_special_tokens)


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_byte_level_text_survives_encoding_and_streaming(text: str) -> None:
    stream = BYTE_LEVEL.stream()
    assert stream.push(BYTE_LEVEL.encode(text)) + stream.finish() == text


def test_character_that_is_never_completed_is_shown_as_replaced(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abc你")
    stream = tokenizer.stream()
    assert stream.push(ids[:-1]) == "abc"
    assert set(stream.finish()) == {REPLACEMENT}
    assert stream.finish() == ""


def test_character_already_shown_is_not_taken_back_by_a_broken_one_after_it() -> None:
    tokenizer = Tokenizer(metaspace())
    ids = tokenizer.encode("a你好")[:-1]
    stream = tokenizer.stream()
    assert stream.push(ids) == "a你"
    assert "a你" + stream.finish() == tokenizer.decode(ids)


def test_special_tokens_are_skipped_or_shown_and_do_not_eat_the_space_after_them() -> None:
    tokenizer = Tokenizer(metaspace())
    space_te, end = tokenizer.encode("te")[0], 2
    for skip, text in [(True, "te te"), (False, "</s> te</s> te")]:
        ids = [end, space_te, end, space_te]
        stream = tokenizer.stream(skip)
        assert "".join(stream.push([token_id]) for token_id in ids) + stream.finish() == tokenizer.decode(ids, skip)
        assert tokenizer.decode(ids, skip) == text


def test_special_tokens_in_the_text_become_themselves_and_none_is_added() -> None:
    core = byte_level()
    core.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    core.enable_truncation(max_length=3)
    core.enable_padding(length=64)
    ids = Tokenizer(core).encode("</s>Hello world, hello")
    assert ids[0] == 1
    assert 0 not in ids
    assert 3 < len(ids) < 64


def test_lone_surrogate_is_a_request_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError) as caught:
        tokenizer.encode("bad \ud800 text")
    assert caught.value.param == "prompt"


def test_ids_beyond_the_vocabulary_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([100_000]) == ""
    assert tokenizer.stream().push([100_000]) == ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "chat_template": "inline"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


def test_open_reads_special_tokens_and_the_chat_template(folder: Path) -> None:
    tokenizer = Tokenizer.open(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.chat_template == "inline"
    (folder / "chat_template.jinja").write_text("文件", encoding="utf-8")
    assert Tokenizer.open(folder).chat_template == "文件"


def test_default_is_taken_from_several_named_chat_templates(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}), encoding="utf-8")
    assert Tokenizer.open(folder).chat_template == "plain"


def test_folder_with_only_a_tokenizer_has_no_special_tokens_or_template(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.open(folder)
    assert (tokenizer.bos_token_id, tokenizer.chat_template, tokenizer.special_tokens) == (None, None, {})
    assert tokenizer.vocab_size == byte_level().get_vocab_size()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
    ],
)
def test_damaged_folder_is_an_artifact_error_naming_the_file(folder: Path, name: str, content: str | None) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(ArtifactError, match=name):
        Tokenizer.open(folder)


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer, stamps, is_over = Tokenizer(byte_level()), [time.perf_counter()], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            stamps.append(time.perf_counter())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started_s = time.perf_counter()
    num_tokens = len(tokenizer.encode("y" * 1_000_000))
    ended_s = time.perf_counter()
    is_over.set()
    watcher.join()
    assert num_tokens > 100_000
    during = [started_s, *(stamp for stamp in stamps if started_s < stamp < ended_s), ended_s]
    longest_s = max(later - earlier for earlier, later in pairwise(during))
    assert longest_s < 0.7 * (ended_s - started_s), "whoever waits for another thread waits for the whole text"
