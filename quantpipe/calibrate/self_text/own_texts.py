"""The base model writes its own calibration text, through the engine that serves it.

A model may repeat what it was trained on, so its text is redacted before it is kept. Kept is one file for each request
and model in the folder given; texts that are there are not written again.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from quantpipe.calibrate.self_text.writer import Writer
from quantpipe.calibration.redaction import Redactor, RedactSection
from quantpipe.calibration.redaction.placeholders import placeholder_key
from quantpipe.calibration.rows import Message
from quantpipe.calibration.samples.self_text import SelfTextRequest, WrittenText
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import DataError
from quantpipe.gate.record import library_versions
from quantpipe.report import Reporter
from quantpipe.sources.base_model import BaseModel

SELF_TEXT_FOLDER = "self_text"
BATCH_SAMPLES = 32
Redact = Callable[[str], str]


def own_texts(base: BaseModel, config: EngineConfig, output: Path, reporter: Reporter) -> "OwnTexts":
    """What writes texts with ``base``; they are kept below ``output``, redacted with all built-in rules."""
    redactor = Redactor(RedactSection(), placeholder_key(SELF_TEXT_FOLDER, 0))
    return OwnTexts(base, config, output / SELF_TEXT_FOLDER, redactor.redact, reporter)


@dataclass
class OwnTexts:
    """Writes texts with one base model, and keeps them in ``folder``. The engine is opened when first needed."""

    base: BaseModel
    config: EngineConfig
    folder: Path
    redact: Redact
    reporter: Reporter
    _writer: Writer | None = field(default=None, init=False)

    def __call__(self, request: SelfTextRequest) -> Iterator[WrittenText]:
        """The texts of a request, in order: those kept from before, then new ones, kept as they come.

        Raises ArtifactError where the runtime does not serve the base model; DataError where it has nothing to begin
        a text with, or where what was kept cannot be read.
        """
        kept = KeptTexts(self.folder / f"{self.key(request)}.jsonl")
        texts = kept.read()
        yield from texts[: request.num_samples]
        if len(texts) < request.num_samples:
            self.reporter.stage(f"the model writes {request.num_samples - len(texts)} samples for itself")
        starts = range(len(texts), request.num_samples, BATCH_SAMPLES)
        for start in self.reporter.progress(starts, len(starts), "batches of own text") if starts else ():
            numbers = range(start, min(start + BATCH_SAMPLES, request.num_samples))
            written = [self._redacted(text) for text in self._open().write(request, numbers)]
            kept.append(written)
            yield from written

    def close(self) -> None:
        """Let go of the engine's memory."""
        self._writer = None

    def key(self, request: SelfTextRequest) -> str:
        """SHA-256 over everything a text depends on; not on how many there are, so that more can be added."""
        settings = {"backend": self.config.backend, "num_threads": self.config.num_threads}
        made_from = [self.base.digest, asdict(replace(request, num_samples=0)), settings, library_versions()]
        return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()

    def _open(self) -> Writer:
        if self._writer is None:
            self._writer = Writer(Engine.open(self.base.folder, self.config), Tokenizer.open(self.base.folder))
        return self._writer

    def _redacted(self, text: WrittenText) -> WrittenText:
        if isinstance(text.content, str):
            return WrittenText(self.redact(text.content), text.language)
        return WrittenText(
            tuple({**message, "content": self.redact(message["content"])} for message in text.content), text.language
        )


@dataclass(frozen=True)
class KeptTexts:
    """A JSON Lines file of texts that grows by whole lines; a line cut off by a crash is written again."""

    path: Path

    def read(self) -> list[WrittenText]:
        """What was kept; the file is cut back to its last whole line."""
        if not self.path.is_file():
            return []
        whole, _, cut_off = self.path.read_bytes().rpartition(b"\n")
        if cut_off:
            with self.path.open("r+b") as file:
                file.truncate(len(whole) + 1 if whole else 0)
        try:
            rows = [json.loads(line) for line in whole.splitlines()]
            return [WrittenText(_content(row["content"]), row["language"]) for row in rows]
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{self.path}: not what was written there; remove it and run again") from None

    def append(self, texts: Sequence[WrittenText]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(asdict(text), ensure_ascii=False) + "\n" for text in texts))


def _content(value: object) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise TypeError
    return tuple({str(key): str(text) for key, text in message.items()} for message in value)
