"""What a release must hold to: bounds on metrics, for which items and against what, and waivers of them."""

from datetime import date
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from quantpipe.gate.metrics import is_sliceable, metric_of
from quantpipe.gate.slice_names import sliced_name, split_name
from quantpipe.recipe.section import Count, Section

ACCURACY = "accuracy"
POINTS, RECOVERY = "accuracy_loss_points", "accuracy_recovery"
BOUNDS = ("max_drop_points", "max_drop_relative", "at_most", "at_least")
DROPS = ("max_drop_points", "max_drop_relative")
SAME_BOUND = {"at_most": "max", "at_least": "min"}
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Versus = Literal["baseline", "previous-release", "absolute"]


def _other_names(schema: dict[str, Any]) -> None:
    for name, same in SAME_BOUND.items():
        schema["properties"][name] = schema["properties"][same] | {"title": name}


class Limit(BaseModel):
    """The worst value still accepted: ``max`` or ``min``, exactly one. A value equal to the limit is accepted.

    ``at_most`` and ``at_least`` are other names of the same two.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, json_schema_extra=_other_names)

    max: FiniteFloat | None = None
    min: FiniteFloat | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_name(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        names = [SAME_BOUND.get(name, name) for name in data]
        if len(set(names)) < len(names):
            raise ValueError(f"found {' and '.join(data)}, which are the same bound; give one of them")
        return dict(zip(names, data.values(), strict=True))

    @model_validator(mode="after")
    def _has_exactly_one_bound(self) -> "Limit":
        if (self.max is None) == (self.min is None):
            raise ValueError("a limit has exactly one of max and min")
        return self

    @property
    def bound(self) -> float:
        """The number itself, whichever side it bounds."""
        bound = self.max if self.max is not None else self.min
        assert bound is not None  # the validator has seen to it
        return bound

    def __str__(self) -> str:
        return f"{'<=' if self.max is not None else '>='} {self.bound:g}"


def limit_problem(name: str, limit: Limit) -> str | None:
    """Why this limit cannot be judged (unknown metric, or it bounds the harmless side); None if it can."""
    metric = metric_of(name)
    if metric is None:
        return "unknown metric"
    if (metric.better == "lower") != (limit.max is not None):
        wanted = "max" if metric.better == "lower" else "min"
        return f"{metric.better} is better, so the limit must be a {wanted}"
    return None


def _day(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return date.fromisoformat(value)
    except ValueError as error:
        raise ValueError(f"found {value!r}; allowed: a date such as 2027-01-31") from error


class Waiver(Section):
    """Why a limit may be missed for a while. What could not be measured is never waived."""

    reason: Annotated[str, Field(min_length=1)]
    """Why; it stands in the verdict."""
    by: Annotated[str, Field(min_length=1)]
    """Who answers for it."""
    until: Annotated[date, BeforeValidator(_day)]
    """The last day that it counts, in UTC."""


class GateLimit(Section):
    """One limit of a gate that is a list. Give exactly one bound; its unit stands in its name."""

    metric: Annotated[str, Field(min_length=1)]
    """One of the metrics below, or `accuracy`, the share of right items."""
    task: Annotated[str, Field(min_length=1)] | None = None
    """Only the items of this task. Absent: the whole suite."""
    slice: dict[str, str] = Field(default_factory=dict)
    """Only items, or windows of held-out text, that have these fields, such as `{language: de}`."""
    min_items: Count | None = None
    """Fewest items that count, 20 in any case; with fewer the limit fails, for it cannot be judged."""
    vs: Versus = "baseline"
    """What the candidate is measured against: the base model, the release in `previous_release`, or nothing: its own
    accuracy."""
    max_drop_points: FiniteFloat | None = None
    """Most points of accuracy that may be lost: 2 is from 80 % to 78 %."""
    max_drop_relative: FiniteFloat | None = None
    """Largest share of the accuracy that may be lost: 0.025 is from 80 % to 78 %."""
    at_most: FiniteFloat | None = None
    """Upper limit, in the unit of the metric, where lower is better."""
    at_least: FiniteFloat | None = None
    """Lower limit, in the unit of the metric, where higher is better."""
    on_unsure: Literal["block", "warn"] = "block"
    """Whether samples that do not decide block the release, or only warn."""
    waiver: Waiver | None = None
    """Lets the limit be missed for a while, in sight of everybody."""

    @model_validator(mode="after")
    def _has_exactly_one_bound(self) -> "GateLimit":
        found = [name for name in BOUNDS if getattr(self, name) is not None]
        if len(found) != 1:
            raise ValueError(f"found {' and '.join(found) or 'no bound'}; give exactly one of {', '.join(BOUNDS)}")
        return self

    @classmethod
    def of(cls, name: str, limit: Limit) -> "GateLimit":
        """The entry that a name with a plain limit stands for; ``mean_kl[domain=legal]`` has a slice."""
        plain, fields = split_name(name) or (name, {})
        if not is_sliceable(plain):
            plain, fields = name, {}
        return cls(metric=plain, slice=fields, at_most=limit.max, at_least=limit.min)

    @property
    def figure(self) -> str:
        """The name of the measurement that is judged."""
        if self.max_drop_points is not None:
            return POINTS
        if self.max_drop_relative is not None:
            return RECOVERY
        return self.metric if self.is_of_items else sliced_name(self.metric, self.slice)

    @property
    def is_of_items(self) -> bool:
        """Whether it is about items of the suite, and not windows of text or anything else."""
        metric = metric_of(self.metric)
        return metric is not None and metric.is_of_items

    @property
    def limit(self) -> Limit:
        """The bound on that measurement."""
        if self.max_drop_points is not None:
            return Limit(max=self.max_drop_points)
        if self.max_drop_relative is not None:
            return Limit(min=1 - self.max_drop_relative)
        return Limit(max=self.at_most, min=self.at_least)

    @property
    def items(self) -> str:
        """Which items of the suite; empty for all, and for what is not of items: that has its slice in its name."""
        if not self.is_of_items:
            return ""
        task = [self.task] if self.task else []
        return ", ".join([*task, *(f"{name}={value}" for name, value in self.slice.items())])

    @property
    def scope(self) -> str:
        """Which items, and against what, where that is not the whole suite against the base model."""
        return ", ".join(filter(None, (self.items, f"vs {self.vs}" if self.vs != "baseline" else "")))

    @property
    def label(self) -> str:
        """What reports call the limit."""
        return f"{self.figure} ({self.scope})" if self.scope else self.figure
