"""Blocks on disk: a folder with ``blocks.safetensors`` and the manifest that says what they are. Never reads a row.

The manifest is written last and holds the digest of the blocks, so a folder that was written halfway is noticed.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantpipe.calibration.calibration_set import Budget, CalibrationSet, digest_blocks
from quantpipe.calibration.checks.leakage import EvalText
from quantpipe.calibration.definition.set_definition import MANIFEST_NAME
from quantpipe.calibration.redaction.placeholders import placeholder_key
from quantpipe.calibration.stored.manifest import (
    SCHEMA,
    accounts_of,
    documents_of,
    manifest_text,
    row_hash,
    tokenizer_digest,
)
from quantpipe.calibration.text.normal_text import normal_digest
from quantpipe.errors import DataError

BLOCKS_NAME = "blocks.safetensors"
REQUIRED = {
    "name",
    "seed",
    "redaction",
    "evaluation_sha256",
    "budget",
    "num_sequences",
    "tokenizer_sha256",
    "blocks_sha256",
    "sources",
    "account",
    "documents",
}  # what is read here


def require_own_folder(folder: Path) -> None:
    """Raise DataError where ``folder`` is something else than a new folder or that of an earlier build."""
    is_other = folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST_NAME).is_file()
    if is_other or folder.is_file():
        raise DataError(f"{folder}: holds other files; give a new folder, or that of an earlier build")


def write_built(folder: Path, calibration: CalibrationSet) -> None:
    """Write the blocks and their manifest, over those of an earlier build.

    Raises DataError where ``folder`` holds something else, or cannot be written.
    """
    from safetensors.numpy import save

    require_own_folder(folder)
    arrays = {"token_ids": np.ascontiguousarray(calibration.token_ids)}
    if calibration.position_ids is not None:
        arrays["position_ids"] = np.ascontiguousarray(calibration.position_ids)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / BLOCKS_NAME, save(arrays))
        _replace(folder / MANIFEST_NAME, manifest_text(calibration.manifest).encode("utf-8"))
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror or error}; choose another folder") from error


def read_built(folder: Path, tokenizer_folder: Path) -> CalibrationSet:
    """The set whose blocks lie in ``folder``.

    Raises DataError where they are damaged, changed, or made with another tokenizer than that of the model.
    """
    manifest = read_manifest(folder)
    if manifest["tokenizer_sha256"] != tokenizer_digest(tokenizer_folder):
        raise DataError(
            f"{folder}: its blocks were built with another tokenizer than that of {tokenizer_folder}; build them again"
        )
    arrays = _read_blocks(folder / BLOCKS_NAME)
    token_ids, position_ids = arrays.get("token_ids"), arrays.get("position_ids")
    if token_ids is None or digest_blocks(token_ids, position_ids) != manifest["blocks_sha256"]:
        raise DataError(f"{folder / BLOCKS_NAME}: differs from what {MANIFEST_NAME} says; build the set again")
    return CalibrationSet(
        name=manifest["name"],
        token_ids=token_ids,
        num_sequences_asked=manifest["budget"]["num_sequences"],
        account=accounts_of(manifest),
        digest=manifest["blocks_sha256"],
        position_ids=position_ids,
        documents=documents_of(manifest),
        manifest=manifest,
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest in a folder of blocks. Raises DataError where it cannot be read or is of another version."""
    file = folder / MANIFEST_NAME
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        found = manifest["schema"]
    except OSError as error:
        raise DataError(f"{file}: {(error.strerror or str(error)).lower()}; build the set again") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: is no manifest of a calibration set; build the set again") from error
    if found == SCHEMA and not set(manifest) >= REQUIRED:
        raise DataError(f"{file}: lacks {', '.join(sorted(REQUIRED - set(manifest)))}; build the set again")
    if found != SCHEMA:
        raise DataError(f"{file}: its schema is {found!r}, not {SCHEMA!r}; build the set again")
    return dict(manifest)


def equal_rows(manifest: Mapping[str, Any], texts: Iterable[EvalText]) -> Iterator[tuple[str, EvalText]]:
    """The rows (``file:row``) whose text is one of ``texts``, with that text: all that the rows' hashes can tell.

    Nothing where a secret keys the hashes.
    """
    if manifest["redaction"]["has_key_file"]:
        return
    key = placeholder_key(manifest["name"], manifest["seed"])
    rows = {hashed: where for where, *_, hashed in manifest["documents"]}
    for text in texts:
        where = rows.get(row_hash(normal_digest(text.text), key))
        if where is not None:
            yield where, text


def built_budget(folder: Path) -> Budget:
    """How many sequences of which length lie in a folder of blocks."""
    manifest = read_manifest(folder)
    return Budget(manifest["num_sequences"], manifest["budget"]["sequence_length"])


def _read_blocks(file: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return dict(load_file(file))
    except (OSError, SafetensorError) as error:
        raise DataError(f"{file}: no blocks can be read here; build the set again") from error


def _replace(file: Path, data: bytes) -> None:
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)  # still there only after an error or an interrupt
