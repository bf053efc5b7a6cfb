"""A GGUF file made into an ordinary Hugging Face model folder: weights dequantized, tokenizer as the file means it.

transformers does the conversion; what it leaves wrong for a model that is to be served is put right here, and checked.
"""

import io
import json
import struct
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

from quantpipe.errors import DataError
from quantpipe.sources.gguf_header import read_gguf_header

# Raise it when the conversion below changes: folders in the cache are keyed by it.
CONVERSION_VERSION = 1

# How byte-level BPE tokenizers split text before merging (`tokenizer.ggml.pre`), where transformers has no rule of its
# own and uses GPT-2's. These vocabularies split every digit off first, else runs of spaces before digits differ.
SPLITS_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
SPLITS_LIKE_GPT2 = frozenset({"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"})

_CONTROL_TOKEN = 3
_ROUND_TRIP = "Tab\there,  12 + 345 = 357.\n    return x  # déjà vu, 你好 🙂"


def dequantize(file: Path, folder: Path, dtype: str) -> None:
    """Write the model in ``file`` to ``folder`` with weights of ``dtype`` (a torch name).

    Raises DataError where the file is damaged, or holds a model or tokenizer that cannot be converted faithfully.
    """
    header = read_gguf_header(file)
    _convert(file, folder, dtype)
    _repair_config(folder / "config.json")
    _repair_generation_config(folder / "generation_config.json", header)
    _repair_tokenizer(file, folder / "tokenizer.json", header)
    _repair_tokenizer_config(folder)
    _check_tokenizer(file, folder, header)


def _convert(file: Path, folder: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedTokenizerFast

    where = {"gguf_file": file.name, "local_files_only": True}
    with _bars_on_terminals_only():
        try:
            model, loading = AutoModelForCausalLM.from_pretrained(
                file.parent,
                quantization_config=GgufConfig(dequantize=True),
                dtype=getattr(torch, dtype),
                output_loading_info=True,
                **where,
            )
            tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, **where)
        except (
            ValueError,
            KeyError,
            IndexError,
            TypeError,
            AttributeError,
            NotImplementedError,
            RuntimeError,
        ) as error:
            reason = str(error).strip().partition("\n")[0]
            raise DataError(
                f"{file}: transformers cannot convert it ({type(error).__name__}: {reason}); use the model's own folder"
            ) from error
        if loading["missing_keys"] or loading["mismatched_keys"]:
            missing = sorted(str(key) for key in {*loading["missing_keys"], *loading["mismatched_keys"]})
            raise DataError(f"{file}: {len(missing)} tensors are missing, {missing[0]} among them; fetch it again")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _bars_on_terminals_only() -> AbstractContextManager[object]:
    """Keep progress bars out of logs and pipes."""
    return nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())


def _repair_config(path: Path) -> None:
    """Drop private keys, and write float32 values as the decimals they stand for (1e-05, not 9.99e-06)."""
    config = {key: value for key, value in _read(path).items() if not key.startswith("_")}
    config.pop("quantization_config", None)
    _write(path, {key: _shortest(value) if isinstance(value, float) else value for key, value in config.items()})


def _shortest(value: float) -> float:
    """The decimal with the fewest digits that is the same float32; ``value`` itself if it is no float32."""
    if struct.unpack("<f", struct.pack("<f", value))[0] != value:
        return value
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((short for short in candidates if struct.pack("<f", short) == struct.pack("<f", value)), value)


def _repair_generation_config(path: Path, header: Mapping[str, Any]) -> None:
    """Keep what ends and begins a text, nothing that would pin how it is sampled; add the end-of-turn token."""
    found = _read(path)
    kept = {key: found[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if found.get(key) is not None}
    ends = [
        kept.get("eos_token_id"),
        header.get("tokenizer.ggml.eos_token_id"),
        header.get("tokenizer.ggml.eot_token_id"),
    ]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    if unique:
        kept["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    _write(path, {**kept, "transformers_version": found.get("transformers_version")})


def _repair_tokenizer(file: Path, path: Path, header: Mapping[str, Any]) -> None:
    """Drop tokens that the file does not have, and split text the way it names.

    DataError where that way is not known, as token ids would differ silently.
    """
    tokenizer = _read(path)
    num_tokens = len(header.get("tokenizer.ggml.tokens", ()))
    tokenizer["added_tokens"] = [token for token in tokenizer.get("added_tokens", ()) if token["id"] < num_tokens]
    splitter, rule = tokenizer.get("pre_tokenizer") or {}, header.get("tokenizer.ggml.pre")
    has_default_rule = header.get("tokenizer.ggml.model") == "gpt2" and splitter.get("type") == "ByteLevel"
    if has_default_rule and rule in SPLITS_DIGITS:
        digits = {"type": "Digits", "individual_digits": True}
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, splitter]}
    elif has_default_rule and rule not in SPLITS_LIKE_GPT2:
        raise DataError(
            f"{file}: its tokenizer splits text by the rule {rule!r}, which is not known here, so token ids would "
            "differ; use the model's own folder instead of the GGUF file"
        )
    _write(path, tokenizer)


def _repair_tokenizer_config(folder: Path) -> None:
    """Drop how it was loaded; name a class that every transformers version has; bound the length as the model does."""
    path = folder / "tokenizer_config.json"
    dropped = ("is_local", "local_files_only", "backend")
    config = {key: value for key, value in _read(path).items() if key not in dropped and value is not None}
    longest = _read(folder / "config.json").get("max_position_embeddings")
    if longest is not None:
        config["model_max_length"] = longest
    _write(path, {**config, "tokenizer_class": "PreTrainedTokenizerFast"})


def _check_tokenizer(file: Path, folder: Path, header: Mapping[str, Any]) -> None:
    """The saved tokenizer has the file's ids for control tokens, no more tokens than the model, and loses no text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens: list[str] = header.get("tokenizer.ggml.tokens", [])
    kinds: list[int] = header.get("tokenizer.ggml.token_type", [])
    for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if kind == _CONTROL_TOKEN and tokenizer.encode(token, add_special_tokens=False).ids != [token_id]:
            raise DataError(f"{file}: control token {token!r} does not become the one id {token_id}; use another file")
    vocab_size = _read(folder / "config.json").get("vocab_size", 0)
    if tokenizer.get_vocab_size() > vocab_size:
        found = f"{tokenizer.get_vocab_size():,} tokens, the model has {vocab_size:,}"
        raise DataError(f"{file}: its tokenizer has {found}; use another file")
    encoded = tokenizer.encode(_ROUND_TRIP, add_special_tokens=False).ids
    if header.get("tokenizer.ggml.model") == "gpt2" and tokenizer.decode(encoded) != _ROUND_TRIP:
        raise DataError(f"{file}: its tokenizer does not give back the text it encodes; use the model's own folder")


def _read(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return loaded


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
