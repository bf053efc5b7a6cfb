"""``divergence.json``: all that was measured on held-out text, for reports and comparisons of releases."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantpipe.gate.record import write_text_atomically

if TYPE_CHECKING:
    from quantpipe.evaluate.divergence import DivergenceResult

SCHEMA = "quantpipe.divergence/1"


def write_divergence_json(path: Path, result: "DivergenceResult", artifact_digest: str) -> None:
    """Figures of all text, of slices, by position and by window. DataError where the disk refuses."""
    record = {
        "schema": SCHEMA,
        "artifact_digest": artifact_digest,
        "baseline": "run" if result.top_k is None else "stored",
        "top_k": result.top_k,
        "base_perplexity": result.base_perplexity,
        "cand_perplexity": result.cand_perplexity,
        "kl": {"median": result.median_kl, "p99": result.p99_kl, "max": result.max_kl},
        "measurements": [_finite(asdict(each)) for each in result.measurements],
        "slices": [asdict(each) for each in result.slices],
        "positions": [asdict(each) for each in result.positions],
        "slope_per_doubling": None if result.slope is None else {"value": result.slope[0], "interval": result.slope[1]},
        "windows": [{"fields": dict(each.fields), **asdict(each.row)} for each in result.windows],
    }
    write_text_atomically(path, json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinities: an open end is None."""
    return {key: None if isinstance(value, float) and math.isinf(value) else value for key, value in record.items()}
