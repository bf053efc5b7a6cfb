"""``calibration.manifest.json``: what blocks were made from and how, without a word of what rows say. Holds no times.

The same set, tokenizer, budget and seed give the same bytes. Rows are named by file and number, and by a keyed hash.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantpipe.calibration.account import SourceAccount
from quantpipe.calibration.calibration_set import Budget, BuildContext, Document
from quantpipe.calibration.checks.leakage import EvalText
from quantpipe.calibration.definition.set_definition import SetDefinition
from quantpipe.calibration.definition.sources import DatasetSource, RowKeys, Source
from quantpipe.calibration.redaction import RULES_VERSION
from quantpipe.calibration.rows import FileRead, SourceReading
from quantpipe.calibration.text.normal_text import normal_digest
from quantpipe.gate.record import library_versions

SCHEMA = "quantpipe.calibration/1"
HASH_BYTES = 16
LIBRARIES = (
    "quantpipe",
    "transformers",
    "tokenizers",
    "datasketch",
    "py3langid",
    "phonenumbers",
    "datasets",
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True)
class BuildRequest:
    """Everything that a build's outcome follows from, beside the files."""

    definition: SetDefinition
    tokenizer_folder: Path
    budget: Budget
    seed: int
    allow_shortfall: bool
    context: BuildContext


def calibration_manifest(
    request: BuildRequest,
    readings: Sequence[SourceReading],
    accounts: Sequence[SourceAccount],
    documents: Sequence[Document],
    row_hashes: Sequence[str],
    blocks_sha256: str,
    num_sequences: int,
) -> dict[str, Any]:
    """The manifest as plain data; ``row_hashes`` go with ``documents``."""
    definition = request.definition
    header, labels = definition.header, [source.label for source in definition.sources]
    return {
        "schema": SCHEMA,
        "name": definition.name,
        "description": header.description,
        "license": header.license,
        "languages": list(header.languages),
        "definition_sha256": digest_of(_definition_data(definition)),
        "seed": request.seed,
        "budget": asdict(request.budget),
        "packing": header.packing,
        "stratify": list(header.stratify),
        "allocation": header.allocation,
        "near_duplicates": header.near_duplicates,
        "holdout": None if header.holdout is None else {"frac": header.holdout.frac},
        "tokenizer_sha256": tokenizer_digest(request.tokenizer_folder),
        "evaluation_sha256": evaluation_digest(request.context.eval_texts),
        "redaction": _redaction(definition),
        "sources": [
            _source(source, reading, definition.folder, request.tokenizer_folder)
            for source, reading in zip(definition.sources, readings, strict=True)
        ],
        "account": [asdict(account) for account in accounts],
        "num_sequences": num_sequences,
        "blocks_sha256": blocks_sha256,
        "versions": library_versions(LIBRARIES),
        "documents": [
            [
                each.where,
                labels.index(each.source),
                each.domain,
                each.language,
                each.num_tokens,
                each.num_tokens_used,
                row,
            ]
            for each, row in zip(documents, row_hashes, strict=True)
        ],
    }


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """The manifest as JSON, one document per line."""
    whole = {key: value for key, value in manifest.items() if key != "documents"}
    text = json.dumps(whole, indent=2, ensure_ascii=False).removesuffix("\n}")
    rows = [json.dumps(row, ensure_ascii=False) for row in manifest.get("documents", ())]
    listed = "[\n    " + ",\n    ".join(rows) + "\n  ]" if rows else "[]"
    return f'{text},\n  "documents": {listed}\n}}\n'


def documents_of(manifest: Mapping[str, Any]) -> tuple[Document, ...]:
    """The documents that a manifest lists."""
    labels = [source["label"] for source in manifest["sources"]]
    return tuple(
        Document(where, labels[source], domain, language, num_tokens, num_used)
        for where, source, domain, language, num_tokens, num_used, _ in manifest["documents"]
    )


def accounts_of(manifest: Mapping[str, Any]) -> tuple[SourceAccount, ...]:
    """The account that a manifest holds."""
    return tuple(SourceAccount(**account) for account in manifest["account"])


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 over the files that a tokenizer is made of, the chat template included."""
    total = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            total.update(f"{name}:{hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def evaluation_digest(texts: Iterable[EvalText]) -> str | None:
    """SHA-256 over the evaluation texts that rows were compared with; None where there were none."""
    digests = sorted(normal_digest(text.text).hex() for text in texts)
    return digest_of(digests) if digests else None


def row_hash(text_digest: bytes, key: bytes) -> str:
    """How a row is named whose text has this digest: only who has the key can ask whether a text is among the rows."""
    return hashlib.blake2b(text_digest, key=key, digest_size=HASH_BYTES).hexdigest()


def digest_of(data: Any) -> str:
    """SHA-256 of plain data in its one JSON form."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, ensure_ascii=False).encode("utf-8")).hexdigest()


def _document(document: Document, labels: Sequence[str]) -> list[Any]:
    source = labels.index(document.source)
    lengths = [document.num_tokens, document.num_tokens_used]
    return [document.where, source, document.domain, document.language, *lengths]


def _definition_data(definition: SetDefinition) -> dict[str, Any]:
    header = definition.header.model_dump(mode="json", exclude={"sources"})
    return header | {"sources": [source.model_dump(mode="json") for source in definition.sources]}


def _redaction(definition: SetDefinition) -> dict[str, Any]:
    section = definition.header.redact
    patterns = {name: digest_of(written) for name, written in section.patterns.items()}
    return {
        "rules_version": RULES_VERSION,
        "rules": list(section.rules),
        "patterns_sha256": patterns,
        "has_key_file": section.key_file is not None,
    }


def _source(source: Source, reading: SourceReading, folder: Path, tokenizer_folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = {
        "label": source.label,
        "kind": source.kind,
        "weight": source.weight,
        "limit": source.limit,
        "num_rows": reading.num_rows,
        "is_limited": reading.is_limited,
        "encodings": dict(sorted(reading.encodings.items())),
        "files": [_file(file, folder) for file in reading.files],
        "definition_sha256": digest_of(source.model_dump(mode="json")),
    }
    if isinstance(source, RowKeys):
        record["fields"] = source.fields.model_dump(mode="json", exclude_defaults=True)
        record["template"] = source.template or ("tokenizer" if source.uses_template else "none")
        record["template_sha256"] = _template_digest(source, folder, tokenizer_folder)
        record["group"] = source.group
        record["drop_columns"] = list(source.drop_columns)
    if isinstance(source, DatasetSource):
        record |= {"dataset": source.dataset, "config": source.config, "split": source.split}
        record["revision"] = reading.revision
    return record


def _template_digest(source: RowKeys, folder: Path, tokenizer_folder: Path) -> str | None:
    """SHA-256 of the template that makes the text, be it the set's file or the tokenizer's chat template."""
    if source.template_file is not None:
        return hashlib.sha256((folder / source.template_file).read_bytes()).hexdigest()
    template = chat_template(tokenizer_folder) if source.uses_template else None
    return None if template is None else hashlib.sha256(template.encode("utf-8")).hexdigest()


def chat_template(folder: Path) -> str | None:
    """The chat template of a tokenizer's folder: its own file, or what the settings hold (of several the default)."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    settings = folder / "tokenizer_config.json"
    found = json.loads(settings.read_text(encoding="utf-8")).get("chat_template") if settings.is_file() else None
    if isinstance(found, list):
        found = {each.get("name"): each.get("template") for each in found}.get("default")
    return found if isinstance(found, str) else None


def _file(file: FileRead, folder: Path) -> dict[str, Any]:
    return {"name": shown_path(file.name, folder), "sha256": file.sha256, "bytes": file.num_bytes}


def shown_path(name: str, folder: Path) -> str:
    """A path as the manifest names it: relative to the set's folder, where it lies in there."""
    return name.removeprefix(f"{folder}/")
