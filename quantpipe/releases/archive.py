"""The archive: an index with a line for each judged release, and a folder with the files of its report.

A release counts once its line is in the index, which is written last. Runs that write at the same time take turns.
"""

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from quantpipe.errors import DataError
from quantpipe.gate.record import write_text_atomically
from quantpipe.reporting.report import Report

INDEX_NAME = "index.jsonl"
SCHEMA = "quantpipe.release/1"
KEPT = ("report.json", "report.html")


@dataclass(frozen=True)
class Release:
    """One line of the index. Digests are SHA-256 in hex; ``folder`` and
    ``output`` are relative to the archive.

    ``figures`` are value, low and high of each metric; an end that is not finite is None. ``machine`` is the digest of
    what the machine is: bench figures of releases compare where it is the same.
    """

    id: str
    recipe: str
    verdict: str
    date: str
    recipe_digest: str
    artifact_digest: str
    base_digest: str
    data: Mapping[str, str]
    machine: str
    versions: Mapping[str, str]
    figures: Mapping[str, tuple[float | None, float | None, float | None]]
    folder: str
    output: str


def add_release(archive: Path, report: Report, output: Path) -> Release:
    """Keep the report that lies in ``output``. A line that an earlier run left cut short is removed first.

    DataError where the archive cannot be written; the verdict in ``output`` stands all the same.
    """
    release = _release(archive, report, output)
    try:
        (archive / release.folder).mkdir(parents=True, exist_ok=True)
        for name in KEPT:
            text = (output / name).read_text(encoding="utf-8")
            write_text_atomically(archive / release.folder / name, text)
        with _locked(archive / INDEX_NAME) as index:
            _repair(index)
            line = json.dumps({"schema": SCHEMA, **asdict(release)}, ensure_ascii=False, allow_nan=False)
            os.write(index, f"{line}\n".encode())
            os.fsync(index)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(
            f"{archive}: the release cannot be kept: {reason}; the verdict in {output} stands; set `archive`"
        ) from error
    return release


def require_writable(archive: Path) -> None:
    """Raise DataError, before any long work, where ``archive`` could not be written. Makes nothing."""
    existing = next(path for path in (archive, *archive.parents) if path.exists())
    if not existing.is_dir():
        raise DataError(
            f"archive: {archive} cannot be written: {existing} is a file; set `archive`, or `archive: none`"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise DataError(
            f"archive: {archive} cannot be written: no permission in {existing}; set `archive`, or `archive: none`"
        )


def read_index(archive: Path) -> tuple[tuple[Release, ...], tuple[str, ...]]:
    """The releases in order, and sentences about lines that cannot be read. DataError where there is no index."""
    path = archive / INDEX_NAME
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}; give the folder of an archive") from error
    releases, problems = [], []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            releases.append(_of_line(line))
        except (ValueError, KeyError, TypeError) as error:
            problems.append(f"{path}:{number}: not a release: {' '.join(str(error).split())[:120]}; it is left out")
    return tuple(releases), tuple(problems)


def machine_digest(machine: Mapping[str, str | int]) -> str:
    """What tells machines apart whose figures must not be compared. The kernel's version is left out."""
    told = {key: value for key, value in machine.items() if key != "system"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def figures_of(report: Report) -> dict[str, tuple[float | None, float | None, float | None]]:
    """Value, low and high of everything that was measured."""
    judged = [check.measurement for check in report.checks if check.measurement is not None]
    return {
        each.name: (_finite(each.value), _finite(each.low), _finite(each.high))
        for each in (*judged, *report.measurements)
    }


def _release(archive: Path, report: Report, output: Path) -> Release:
    context = report.context
    moment = "".join(letter for letter in context.date[:19] if letter.isdigit() or letter == "T")
    told = json.dumps([context.recipe_digest, context.artifact_digest, context.date, figures_of(report)])
    identity = f"{moment}-{context.recipe_name}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"
    return Release(
        id=identity,
        recipe=context.recipe_name,
        verdict=report.title,
        date=context.date,
        recipe_digest=context.recipe_digest,
        artifact_digest=context.artifact_digest,
        base_digest=context.base_digest,
        data=report.data,
        machine=machine_digest(context.machine),
        versions=context.versions,
        figures=figures_of(report),
        folder=identity,
        output=os.path.relpath(output.resolve(), archive.resolve()),
    )


def _of_line(line: str) -> Release:
    record: dict[str, Any] = json.loads(line)
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not '{SCHEMA}'")
    known = {each.name for each in fields(Release)}
    if missing := known - record.keys():
        raise ValueError(f"{sorted(missing)[0]} is missing")
    found = {key: value for key, value in record.items() if key in known}
    figures = {name: tuple(values) for name, values in found["figures"].items()}
    return Release(**{**found, "figures": figures})


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The index, open for appending, while no other run has it."""
    index = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(index, fcntl.LOCK_EX)
        yield index
    finally:
        os.close(index)


def _repair(index: int) -> None:
    """Cut off what stands behind the last line's end: a run was killed as it wrote. A whole line gets its end."""
    content = os.pread(index, os.fstat(index).st_size, 0)
    whole, _, rest = content.rpartition(b"\n")
    if not rest:
        return
    try:
        _of_line(rest.decode())
        os.write(index, b"\n")
    except (ValueError, KeyError, TypeError):
        os.ftruncate(index, len(whole) + 1 if whole else 0)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
