"""The results of a run on disk, beside its verdict: ``measurements.json``, and ``items.jsonl`` with a line an item.

What was asked and answered is left out: of a prediction its digest is kept, which tells whether two are equal. Plain
JSON; nothing here needs a model, or what runs one.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantpipe.errors import DataError
from quantpipe.evaluate.comparison import Comparison, Pair
from quantpipe.evaluate.fidelity.windows import window_of, window_record
from quantpipe.evaluate.items import ItemResult
from quantpipe.gate.record import (
    ITEMS_NAME,
    MEASUREMENTS_NAME,
    measurement_of,
    measurement_record,
    write_text_atomically,
)
from quantpipe.reporting.json_form import parts_of, parts_record
from quantpipe.reporting.report import ReportParts
from quantpipe.verdict.results import Results

SCHEMA = "quantpipe.measurements/2"
Record = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """What the results are of, so that they are used for nothing else. Digests are SHA-256 in hex.

    ``sections`` are those of the recipe, by name; ``suite_files`` and ``text_files`` of what was asked as it lay on
    disk, empty where nothing did. ``stamps`` are sizes and times of the artifact's files (``file_stamps``).
    """

    sections: Mapping[str, str]
    suite_files: str
    text_files: str
    stamps: Mapping[str, list[int]]


@dataclass(frozen=True)
class StoredRun:
    """Results, what they are of, and ``parts``: all else that their report says, but for the suite's section, which
    follows from the results. Their context is the first verdict's."""

    results: Results
    source: Source
    parts: ReportParts


def write_results(output: Path, run: StoredRun) -> None:
    """Write both files under ``output``. DataError if the disk refuses."""
    results = run.results
    pairs = results.comparison.pairs if results.comparison is not None else ()
    lines = "".join(json.dumps(_item_record(pair), ensure_ascii=False, allow_nan=False) + "\n" for pair in pairs)
    record = {
        "schema": SCHEMA,
        "source": asdict(run.source),
        "num_items": results.num_items,
        "num_windows": results.num_windows,
        "items_digest": hashlib.sha256(lines.encode()).hexdigest(),
        "windows": [_plain(window_record(window)) for window in results.windows],
        "top_k": results.top_k,
        "bench": results.bench,
        "mismatches": None if results.mismatches is None else measurement_record(results.mismatches),
        "prompts": None if results.prompts is None else measurement_record(results.prompts),
        "measurements": [measurement_record(measurement) for measurement in results.measurements()],
        "report": parts_record(run.parts),
    }
    write_text_atomically(output / ITEMS_NAME, lines)
    text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_text_atomically(output / MEASUREMENTS_NAME, text)


def read_results(output: Path) -> StoredRun:
    """The reverse of ``write_results``. DataError where a file is missing, damaged, or belongs to another run."""
    path = output / MEASUREMENTS_NAME
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["schema"] != SCHEMA:
            raise ValueError(f"schema is '{record['schema']}', not '{SCHEMA}'")
        lines = (output / ITEMS_NAME).read_bytes()
        if hashlib.sha256(lines).hexdigest() != record["items_digest"]:
            raise ValueError(f"{ITEMS_NAME} is of another run, or was changed")
        pairs = tuple(_pair_of(json.loads(line)) for line in lines.decode().splitlines())
        return _run_of(record, pairs)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{error.filename or path}: cannot be read: {reason}; run the recipe first") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        found = " ".join(str(error).split())
        raise DataError(f"{path}: no results of a run: {found}; run the recipe again") from error


def _run_of(record: Record, pairs: tuple[Pair, ...]) -> StoredRun:
    mismatches, prompts = record["mismatches"], record["prompts"]
    results = Results(
        comparison=Comparison(pairs) if pairs else None,
        windows=tuple(window_of(_floats(window)) for window in record["windows"]),
        top_k=None if record["top_k"] is None else int(record["top_k"]),
        bench={name: tuple((float(b), float(c)) for b, c in rounds) for name, rounds in record["bench"].items()},
        mismatches=None if mismatches is None else measurement_of(mismatches),
        prompts=None if prompts is None else measurement_of(prompts),
        num_items=int(record["num_items"]),
        num_windows=int(record["num_windows"]),
    )
    return StoredRun(results, Source(**record["source"]), parts_of(record["report"]))


def _item_record(pair: Pair) -> Record:
    item = pair[0]
    shared = {name: getattr(item, name) for name in ("task", "doc_id", "domain", "cluster", "prompt_digest")}
    return {**shared, "slices": dict(item.slices), "base": _outcome(pair[0]), "cand": _outcome(pair[1])}


def _outcome(item: ItemResult) -> Record:
    prediction = hashlib.sha256(item.prediction.encode()).hexdigest()[:16]
    margin = item.margin if item.margin is None or math.isfinite(item.margin) else str(item.margin)
    return {"score": item.score, "prediction": prediction, "margin": margin}


def _pair_of(record: Record) -> Pair:
    base, cand = (_item_of(record, record[side]) for side in ("base", "cand"))
    return base, cand


def _item_of(record: Record, outcome: Record) -> ItemResult:
    margin = outcome["margin"]
    return ItemResult(
        record["task"],
        record["doc_id"],
        record["domain"],
        record["cluster"],
        float(outcome["score"]),
        record["prompt_digest"],
        "",
        outcome["prediction"],
        None if margin is None else float(margin),
        dict(record["slices"]),
    )


def _plain(row: Mapping[str, Any]) -> Record:
    """JSON has no infinities and no NaN: these become the strings that float() reads back."""
    return {name: str(v) if isinstance(v, float) and not math.isfinite(v) else v for name, v in row.items()}


def _floats(row: Mapping[str, Any]) -> Record:
    return dict(_read_back(row))


def _read_back(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        yield name, float(value) if value in ("nan", "inf", "-inf") else value
