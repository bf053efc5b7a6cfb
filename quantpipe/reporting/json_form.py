"""The report as JSON, and back: every number unrounded, under a schema that pydantic derives from the dataclasses.

JSON has no infinities and no NaN: these are the strings ``inf``, ``-inf`` and ``nan``, which ``float`` reads back.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from quantpipe.errors import DataError
from quantpipe.reporting.report import Report, ReportParts

SCHEMA = "quantpipe.report/1"


def render_json(report: Report) -> str:
    """The report as strict JSON."""
    record = {"schema": SCHEMA, **_plain(_adapter().dump_python(report))}
    return json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read_json(path: Path) -> Report:
    """The reverse. DataError where the file is missing, of another version, or damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict) or record.pop("schema", None) != SCHEMA:
            raise ValueError(f"its schema is not '{SCHEMA}'")
        return _adapter().validate_python(record)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}; run the recipe first") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{path}: not a report: {where}: {first['msg']}; run the recipe again") from error
    except ValueError as error:
        raise DataError(f"{path}: not a report: {' '.join(str(error).split())}; run the recipe again") from error


def report_schema() -> dict[str, Any]:
    """The JSON schema of ``report.json``."""
    schema = _adapter().json_schema(mode="validation")
    schema["properties"] = {"schema": {"const": SCHEMA}, **schema["properties"]}
    schema["required"] = ["schema", *schema["required"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def parts_record(parts: ReportParts) -> dict[str, Any]:
    """The parts of a report as plain JSON data."""
    record: dict[str, Any] = _plain(TypeAdapter(ReportParts).dump_python(parts))
    return record


def parts_of(record: Mapping[str, Any]) -> ReportParts:
    """The reverse. ValueError where the data are others."""
    return TypeAdapter(ReportParts).validate_python(record)


def _adapter() -> TypeAdapter[Report]:
    return TypeAdapter(Report)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
