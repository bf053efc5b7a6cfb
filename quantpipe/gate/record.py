"""How a verdict is kept: ``gate.json``, with what it is bound to (digests, settings, versions, machine).

Knows plain data only: strings and numbers that other parts hand over, never tensors or engines.
"""

import hashlib
import json
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from quantpipe import __version__
from quantpipe.errors import DataError
from quantpipe.gate.judge import Check, GateResult, Measurement, Verdict, overall
from quantpipe.gate.limits import GateLimit, Limit

SCHEMA = "quantpipe.gate/1"
GATE_NAME, REPORT_NAME = "gate.json", "report.md"
ARTIFACT_FOLDER = "artifact"  # beside them, in the folder of a run
MEASUREMENTS_NAME, ITEMS_NAME = "measurements.json", "items.jsonl"
DIVERGENCE_NAME = "divergence.json"
# What each model answered.
OUTPUTS_NAMES = {"baseline": "outputs-baseline.jsonl", "candidate": "outputs-candidate.jsonl"}
REPORT_NAMES = (REPORT_NAME, "report.html", "report.json", "junit.xml", "model_card.md")
LIBRARIES = (
    "quantpipe",
    "torch",
    "transformers",
    "compressed-tensors",
    "lm-eval",
    "numpy",
    "safetensors",
    "tokenizers",
)

SIMD_FLAGS = (
    "avx2",
    "avx512f",
    "avx_vnni",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
)  # as Linux names them


@dataclass(frozen=True)
class RunContext:
    """What a verdict is bound to. Digests are sha256 in hex; ``engine`` holds the settings that served both models.

    ``suite_digest`` and ``text_digest`` are of what both were asked, empty where nothing was; ``engine_digest`` is of
    ``engine`` and ``versions`` together; ``manifest_digest`` of the artifact's manifest, empty for a folder without.
    ``date`` is the verdict's, ``measured`` when the results were measured that it rests on.
    """

    recipe_name: str
    recipe_digest: str
    artifact_digest: str
    base_digest: str
    base_origin: str
    engine: Mapping[str, str | bool | int | float | None]
    versions: Mapping[str, str]
    machine: Mapping[str, str | int]
    date: str
    suite_digest: str = ""
    text_digest: str = ""
    engine_digest: str = ""
    manifest_digest: str = ""
    measured: str = ""


def engine_digest(engine: Mapping[str, str | int | float | None], versions: Mapping[str, str]) -> str:
    """SHA-256 of what served: the engine's settings, and the versions of the libraries it ran on."""
    return hashlib.sha256(json.dumps([dict(engine), dict(versions)], sort_keys=True).encode()).hexdigest()


def library_versions(names: Sequence[str] = LIBRARIES) -> dict[str, str]:
    """Version by distribution name, ``not installed`` where it is missing. Imports none of them."""
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            # run from its sources
            versions[name] = __version__ if name == "quantpipe" else "not installed"
    return versions


def machine_facts() -> dict[str, str | int]:
    """CPU model, its vector instructions, usable cores, system: figures from unlike machines must not be compared."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    flags = fields.get("flags", "").split()
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "simd": " ".join(name for name in SIMD_FLAGS if name in flags) or "unknown",
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.release()}",
    }


def utc_now() -> str:
    """The date and time of a verdict, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_text_atomically(path: Path, text: str) -> None:
    """Write ``text`` so that a reader sees the old file or the whole new one. DataError if the disk refuses."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)  # still there only after an error or an interrupt
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written: {error.strerror or error}; free space or change `output`"
        ) from error


def withdraw_verdict(output: Path) -> None:
    """Remove the verdict in ``output`` and what it rests on: they must not stand beside another artifact."""
    for name in (GATE_NAME, *REPORT_NAMES, MEASUREMENTS_NAME, ITEMS_NAME, DIVERGENCE_NAME, *OUTPUTS_NAMES.values()):
        (output / name).unlink(missing_ok=True)


def write_gate_json(path: Path, result: GateResult, context: RunContext) -> None:
    """Write the verdict, every check and what they are bound to, as strict JSON, atomically."""
    record = {
        "schema": SCHEMA,
        "verdict": result.verdict,
        "exit_code": result.verdict.exit_code,
        "title": result.title,
        "correction": result.correction,
        "checks": [_check_record(check) for check in result.checks],
        "informational": [measurement_record(m) for m in result.informational],
        "context": asdict(context),
    }
    write_text_atomically(path, json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_gate_json(path: Path) -> tuple[GateResult, RunContext]:
    """The reverse of ``write_gate_json``. DataError if the file is missing, damaged or contradicts itself."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["schema"] != SCHEMA:
            raise ValueError(f"schema is '{record['schema']}', not '{SCHEMA}'")
        checks = tuple(_check_of(row) for row in record["checks"])
        informational = tuple(measurement_of(row) for row in record["informational"])
        result = GateResult(Verdict(record["verdict"]), checks, informational, record.get("correction", "none"))
        if result.verdict is not overall([check.counted for check in checks]):
            raise ValueError(f"the verdict {result.verdict} does not follow from its checks")
        return result, RunContext(**record["context"])
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}; run the recipe first") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        found = " ".join(str(error).split())
        raise DataError(f"{path}: not a gate record: {found}; run the recipe again") from error


def _number(value: float) -> float | str:
    """JSON has no infinities and no NaN: these become the strings float() reads back."""
    return value if math.isfinite(value) else str(value)


def measurement_record(measurement: Measurement) -> dict[str, Any]:
    """A measurement as strict JSON: what is not finite is text."""
    record = asdict(measurement)
    return record | {key: _number(record[key]) for key in ("value", "low", "high", "confidence")}


def measurement_of(record: Mapping[str, Any]) -> Measurement:
    """The reverse of ``measurement_record``."""
    return Measurement(**{**record, **{key: float(record[key]) for key in ("value", "low", "high", "confidence")}})


def _check_record(check: Check) -> dict[str, Any]:
    return {
        "metric": check.metric,
        "limit": check.limit.model_dump(exclude_none=True),
        "verdict": check.verdict,
        "is_waived": check.is_waived,
        "reason": check.reason,
        "entry": check.entry.model_dump(mode="json", exclude_defaults=True),
        "measurement": None if check.measurement is None else measurement_record(check.measurement),
    }


def _check_of(record: Mapping[str, Any]) -> Check:
    measurement = None if record["measurement"] is None else measurement_of(record["measurement"])
    limit = Limit(**record["limit"])
    entry = GateLimit.model_validate(record["entry"]) if "entry" in record else GateLimit.of(record["metric"], limit)
    if (entry.figure, entry.limit) != (record["metric"], limit):
        raise ValueError(f"the check of {record['metric']} is not that of its entry, {entry.label} {entry.limit}")
    verdict, is_waived = Verdict(record["verdict"]), bool(record.get("is_waived", False))
    if is_waived and entry.waiver is None:
        raise ValueError(f"{entry.label} is waived without a waiver")
    return Check(entry, measurement, verdict, record["reason"], is_waived)
