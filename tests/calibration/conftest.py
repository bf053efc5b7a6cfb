"""A tokenizer of one token per byte and folders with small sets, made for each test."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] + ':' + message['content'] + eos_token + '\n' }}{% endfor %}"
)


@pytest.fixture
def make_tokenizer(tmp_path: Path) -> Callable[..., Path]:
    """Write a byte-level tokenizer: bytes are ids 0-255 in some order, ``<s>`` is 256, ``</s>`` is 257."""

    def make(
        template: str | None = PLAIN_TEMPLATE, adds_bos: bool = False, eos: str | None = "</s>", name: str = "model"
    ) -> Path:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<s>", "</s>"])
        if adds_bos:
            tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
        named = {"bos_token": "<s>"} | ({"eos_token": eos} if eos else {})
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
        fast.chat_template = template
        folder = tmp_path / name
        fast.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def make_set(tmp_path: Path) -> Callable[..., Path]:
    """Write a set folder with one file ``rows.jsonl`` and the YAML of its single source's fields and template."""

    def make(rows: Sequence[str | bytes], source: str = "fields: {text: text}", name: str = "set") -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        encoded = [row.encode() if isinstance(row, str) else row for row in rows]
        (folder / "rows.jsonl").write_bytes(b"".join(row + b"\n" for row in encoded))
        text = f"version: 1\nname: tiny\nsources:\n  - kind: jsonl\n    path: rows.jsonl\n    {source}\n"
        (folder / "set.yaml").write_text(text, encoding="utf-8")
        return folder

    return make
