"""How a verdict is kept: ``gate.json``, with what it is bound to (digests, settings, versions, machine).

Knows plain data only: strings and numbers that other parts hand over, never tensors or engines.
"""

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
from quantpipe.gate.judge import Check, GateResult, Limit, Measurement, Verdict, overall

SCHEMA = "quantpipe.gate/1"
GATE_NAME, REPORT_NAME = "gate.json", "report.md"
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
    """What a verdict is bound to. Digests are sha256 in hex; ``engine`` holds the settings that served both models."""

    recipe_name: str
    recipe_digest: str
    artifact_digest: str
    base_digest: str
    base_origin: str
    engine: Mapping[str, str | bool | int | float | None]
    versions: Mapping[str, str]
    machine: Mapping[str, str | int]
    date: str


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
    """Remove the verdict in ``output``: it must not stand beside an artifact that it does not judge."""
    for name in (GATE_NAME, *REPORT_NAMES):
        (output / name).unlink(missing_ok=True)


def write_gate_json(path: Path, result: GateResult, context: RunContext) -> None:
    """Write the verdict, every check and what they are bound to, as strict JSON, atomically."""
    record = {
        "schema": SCHEMA,
        "verdict": result.verdict,
        "exit_code": result.verdict.exit_code,
        "checks": [_check_record(check) for check in result.checks],
        "informational": [_measurement_record(m) for m in result.informational],
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
        informational = tuple(_measurement_of(row) for row in record["informational"])
        result = GateResult(Verdict(record["verdict"]), checks, informational)
        if result.verdict is not overall([check.verdict for check in checks]):
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


def _measurement_record(measurement: Measurement) -> dict[str, Any]:
    record = asdict(measurement)
    return record | {key: _number(record[key]) for key in ("value", "low", "high", "confidence")}


def _measurement_of(record: Mapping[str, Any]) -> Measurement:
    return Measurement(**{**record, **{key: float(record[key]) for key in ("value", "low", "high", "confidence")}})


def _check_record(check: Check) -> dict[str, Any]:
    return {
        "metric": check.metric,
        "limit": check.limit.model_dump(exclude_none=True),
        "verdict": check.verdict,
        "reason": check.reason,
        "measurement": None if check.measurement is None else _measurement_record(check.measurement),
    }


def _check_of(record: Mapping[str, Any]) -> Check:
    measurement = None if record["measurement"] is None else _measurement_of(record["measurement"])
    limit = Limit(**record["limit"])
    return Check(record["metric"], limit, measurement, Verdict(record["verdict"]), record["reason"])
