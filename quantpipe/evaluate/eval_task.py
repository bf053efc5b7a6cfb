"""An lm-eval task as data: read and checked, by whatever way its items came. Imports nothing of lm-eval."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ITEM_FIELDS = ("id", "domain", "cluster")
# What of an lm-eval task's configuration has no part in what a model is given.
SCORING_KEYS = ("metric_list", "metadata", "doc_to_target")
ItemMetric = Literal["acc", "acc_norm", "acc_bytes", "exact_match"]  # those of lm-eval that are 0 or 1 for each item


@dataclass(frozen=True)
class EvalTask:
    """One task of local items. ``metric`` says whether an item is right; ``config`` is what lm-eval takes.

    ``slices`` are fields of the items by which results are shown, beside ``domain``.
    """

    name: str
    metric: str
    folder: Path
    config: Mapping[str, Any]
    docs: tuple[Mapping[str, Any], ...]
    slices: tuple[str, ...] = ()

    @property
    def num_items(self) -> int:
        return len(self.docs)

    @property
    def content(self) -> Any:
        """All that a result depends on, as plain data."""
        return [self.name, self.metric, self.config, self.docs, *([self.slices] if self.slices else [])]

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(str(doc["id"]) for doc in self.docs)

    @property
    def item_slices(self) -> tuple[Mapping[str, str], ...]:
        """The slices that each item belongs to."""
        return tuple({name: str(doc[name]) for name in ("domain", *self.slices)} for doc in self.docs)

    @property
    def asked(self) -> Any:
        """Of ``content``, what the model is given."""
        target = self.config.get("doc_to_target")
        config = {key: value for key, value in self.config.items() if key not in SCORING_KEYS}
        docs = [{key: value for key, value in doc.items() if key != target} for doc in self.docs]
        return [config, docs]


@dataclass(frozen=True)
class HubTask:
    """One of lm-eval's own tasks with data of the hub; ``built`` is lm-eval's task, ``places`` are the items asked."""

    name: str
    metric: str
    built: Any = field(compare=False)
    config: Mapping[str, Any]
    places: tuple[int, ...]
    docs: tuple[Mapping[str, Any], ...]

    @property
    def num_items(self) -> int:
        return len(self.docs)

    @property
    def content(self) -> Any:
        """All that a result depends on, as plain data."""
        return [self.name, self.metric, self.config, self.places, self.docs]

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(str(place) for place in self.places)

    @property
    def item_slices(self) -> tuple[Mapping[str, str], ...]:
        """The slices that each item belongs to: none."""
        return tuple({} for _ in self.docs)

    @property
    def asked(self) -> Any:
        """Of ``content``, what the model is given."""
        config = {key: value for key, value in self.config.items() if key not in SCORING_KEYS}
        return [self.name, config, self.places, self.docs]
