"""Where the time of an engine's steps goes. Sums of seconds; knows no steps."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class StepTimes:
    """Seconds since the engine was opened: choosing what to compute, laying it out, computing it, choosing tokens, and
    noting what came of it."""

    scheduler_s: float = 0.0
    batch_s: float = 0.0
    model_s: float = 0.0
    sampling_s: float = 0.0
    update_s: float = 0.0

    def by_part(self, model_parts: Mapping[str, float]) -> dict[str, float]:
        """By name; the model's time by its parts where those are known, ``model`` being what is left of it."""
        return {
            "scheduler": self.scheduler_s,
            "batch": self.batch_s,
            **model_parts,
            "model": self.model_s - sum(model_parts.values()),
            "sampling": self.sampling_s,
            "update": self.update_s,
        }
