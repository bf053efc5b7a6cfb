"""Answers of earlier runs, found by all that they depend on: a second run with the same baseline asks it nothing."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import quantpipe
from quantpipe.errors import DataError
from quantpipe.evaluate.items import SuiteResult
from quantpipe.evaluate.outputs import read_outputs, write_outputs
from quantpipe.evaluate.served import ServedModel, TextCodec
from quantpipe.evaluate.suite import Suite, run_suite
from quantpipe.formats.digests import file_digest
from quantpipe.gate.record import library_versions
from quantpipe.report import Progress, no_progress

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
LIBRARIES = ("torch", "numpy", "tokenizers", "lm-eval", "jinja2", "sacrebleu", "jsonschema-rs")
SOURCE_ENDINGS = (".py", ".cpp", ".h", ".inc")


@dataclass(frozen=True)
class Asked:
    """All that a model's answers depend on: digests of model, tokenizer with template, suite and our code.

    ``settings`` are those of the engine, and what its backend says of this machine.
    """

    model: str
    tokenizer: str
    suite: str
    code: str
    settings: Mapping[str, Any]

    @property
    def key(self) -> str:
        """One digest over all of it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True, default=str).encode()).hexdigest()


def run_suite_once(
    engine: ServedModel,
    tokenizer: TextCodec,
    suite: Suite,
    asked: Asked,
    folder: Path,
    progress: Progress = no_progress,
) -> tuple[SuiteResult, bool]:
    """The model's answers, and whether they were found in ``folder`` instead of asked for."""
    file = folder / f"{asked.key}.jsonl"
    if file.is_file():
        try:
            saved = read_outputs(file)
        except DataError:  # damaged: a cache is only there to save time
            file.unlink(missing_ok=True)
        else:
            return saved.result, True
    result = run_suite(engine, tokenizer, suite, progress)
    write_outputs(file, suite, asked.model, result)
    return result, False


def tokenizer_digest(folder: Path) -> str:
    """Over the files of a model folder that make token ids of text and of conversations."""
    found = [(name, file_digest(folder / name)) for name in TOKENIZER_FILES if (folder / name).is_file()]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


@cache
def code_digest() -> str:
    """Over the sources of this package, and the versions of libraries that take part in answers and scores."""
    folder = Path(quantpipe.__file__).parent
    total = hashlib.sha256(json.dumps(library_versions(LIBRARIES), sort_keys=True).encode())
    for file in sorted(path for path in folder.rglob("*") if path.suffix in SOURCE_ENDINGS):
        total.update(f"{file.relative_to(folder)}:{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()
