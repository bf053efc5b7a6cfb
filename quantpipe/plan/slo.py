"""What replies may take at most, as ``--slo`` says it."""

import math
from dataclasses import dataclass

from quantpipe.errors import RecipeError, suggest
from quantpipe.plan.burst import Times

KEYS = ("ttft_ms", "tpot_ms")


@dataclass(frozen=True)
class Slo:
    """Milliseconds; None where nothing is asked."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def is_asked(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def is_met(self, times: Times) -> bool:
        """By the expected times."""
        return (self.ttft_ms is None or 1e3 * times.ttft_s <= self.ttft_ms) and (
            self.tpot_ms is None or 1e3 * times.tpot_s <= self.tpot_ms
        )


def parse_slo(text: str) -> Slo:
    """``ttft_ms=500,tpot_ms=50``, either or both. RecipeError for anything else."""
    found: dict[str, float] = {}
    for part in filter(None, (own.strip() for own in text.split(","))):
        key, _, value = (own.strip() for own in part.partition("="))
        if key not in KEYS:
            raise RecipeError(f"--slo: unknown '{key}'{suggest(key, KEYS)}; write it as ttft_ms=500,tpot_ms=50")
        if key in found:
            raise RecipeError(f"--slo: {key} is given twice")
        found[key] = _milliseconds(key, value)
    return Slo(found.get("ttft_ms"), found.get("tpot_ms"))


def _milliseconds(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise RecipeError(f"--slo: {key}: found '{text}'; give milliseconds above 0")
    return value
