"""Text to token ids and back, from a model folder's ``tokenizer.json``. Knows no chat format.

``DetokenizerStream`` turns a growing list of ids into pieces of text without ever splitting a character. It decodes a
short window twice, without and with the new tokens, and gives out the difference: decoders treat the first token of
what they are given specially (they strip its leading space), and the window's first token is the same both times.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from quantpipe.errors import ArtifactError, RequestError

# What decoders write for bytes that are not, or not yet, a character.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A model folder's tokenizer, with what a chat template needs: its ``special_tokens`` and ``chat_template``."""

    def __init__(
        self, core: tokenizers.Tokenizer, special_tokens: dict[str, str] | None = None, chat_template: str | None = None
    ) -> None:
        self._core = core
        # A tokenizer.json may carry the truncation and padding of the last training run: never wanted here.
        core.no_truncation()
        core.no_padding()
        self.special_tokens = special_tokens or {}
        self.chat_template = chat_template

    @classmethod
    def open(cls, folder: Path) -> "Tokenizer":
        """Read ``tokenizer.json``, and beside it what names special tokens and the chat template. ArtifactError."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ArtifactError(f"{path}: missing; the runtime reads this file only, export the tokenizer to it")
        try:
            core = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ArtifactError(f"{path}: not a tokenizer the tokenizers library can read ({error})") from error
        config = _read_json(folder / "tokenizer_config.json")
        names = {**_read_json(folder / "special_tokens_map.json"), **config}
        special_tokens = {name: text for name in SPECIAL_TOKENS if (text := _content(names.get(name))) is not None}
        return cls(core, special_tokens, _chat_template(folder, config))

    @property
    def vocab_size(self) -> int:
        """Number of distinct ids, added tokens included; the model's own may be padded beyond it."""
        return int(self._core.get_vocab_size(with_added_tokens=True))

    def has_same_tokens_as(self, other: "Tokenizer") -> bool:
        """Whether texts become the same ids, and ids the same texts."""
        return str(self._core.to_str()) == str(other._core.to_str())

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``; special tokens written in it become themselves.

        None is added unless ``add_special_tokens``: then those the folder wants around plain text, mostly one BOS.
        """
        try:
            # As a batch of one: only for batches does the library let other threads run meanwhile, and without offsets,
            # which nobody reads, it takes half the time.
            [encoding] = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoding.ids)
        except (TypeError, UnicodeEncodeError):
            raise RequestError("prompt: not valid Unicode text (it holds a lone surrogate)", "prompt") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``. Bytes that form no character become U+FFFD, just as ``stream`` gives them out."""
        text = self._decode_window(ids, skip_special_tokens)
        if REPLACEMENT not in text:
            return text
        # Decoders with byte fallback replace a whole run of bytes for one bad one, characters already shown included.
        stream = DetokenizerStream(self, skip_special_tokens)
        return stream.push(ids) + stream.finish()

    def is_special(self, text: str) -> bool:
        """Whether ``text`` is a token that decoding leaves out as one that is no text."""
        added = self._core.get_added_tokens_decoder().values()
        return any(token.special and token.content == text for token in added)

    def to_json(self) -> str:
        """The tokenizer as the text of a ``tokenizer.json``."""
        return str(self._core.to_str())

    def token(self, token_id: int) -> str | None:
        """The name of a token in the vocabulary; None where there is no such token."""
        name = self._core.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        return None if name is None else str(name)

    def stream(self, skip_special_tokens: bool = True) -> "DetokenizerStream":
        """A new stream, for one request."""
        return DetokenizerStream(self, skip_special_tokens)

    def _decode_window(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self._core.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        token_id = None if text is None else self._core.token_to_id(text)
        return None if token_id is None else int(token_id)


class DetokenizerStream:
    """Text of a growing sequence. What ``push`` and ``finish`` return, concatenated, is ``decode`` of all ids."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # The last tokens shown, kept as context, followed by tokens that await the rest of their character.
        self._window: list[int] = []
        self._num_shown = 0
        self._shown_text = ""

    def push(self, ids: Sequence[int]) -> str:
        """The text that ``ids`` complete. Part of a character is held back until the rest of it comes."""
        return "".join(self._push_one(token_id) for token_id in ids)

    def finish(self) -> str:
        """What is still held back: U+FFFD for a character that was never completed."""
        text = self._decode(self._window)
        held, self._window, self._num_shown, self._shown_text = text[len(self._shown_text) :], [], 0, ""
        return held

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) <= len(self._shown_text) or text.endswith(REPLACEMENT):
            return ""
        new_text = text[len(self._shown_text) :]
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        self._shown_text = self._decode(self._window)
        return new_text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer._decode_window(ids, self._skip_special_tokens)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: holds a JSON {type(content).__name__}, not an object")
    return content


def _content(token: object) -> str | None:
    """A special token is stored as its text or as an object that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        named = {entry["name"]: entry["template"] for entry in template if {"name", "template"} <= entry.keys()}
        template = named.get("default")
    return template if isinstance(template, str) else None
