"""Limits of both forms: exactly one bound, whose unit stands in its name, and what figure it is about."""

import math

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from quantpipe.gate.limits import GateLimit, Limit


@pytest.mark.parametrize(
    "fields",
    [{}, {"max": 1.0, "min": 0.0}, {"max": math.nan}, {"min": math.inf}, {"max": "1"}, {"max": True}, {"most": 1.0}],
)
def test_malformed_limits_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Limit.model_validate(fields)


def test_a_limit_nests_in_a_strict_model_and_takes_whole_numbers() -> None:
    class Section(BaseModel):
        model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
        gate: dict[str, Limit]

    section = Section.model_validate({"gate": {"accuracy_loss_points": {"max": 5}}})
    assert section.gate["accuracy_loss_points"].bound == 5.0
    assert str(section.gate["accuracy_loss_points"]) == "<= 5"
    assert str(Limit(min=0.95)) == ">= 0.95"


def test_at_most_and_at_least_are_other_names_of_max_and_min() -> None:
    assert Limit.model_validate({"at_most": 0.05}) == Limit(max=0.05)
    assert Limit.model_validate({"at_least": 0.9}) == Limit(min=0.9)
    with pytest.raises(ValidationError, match="the same bound; give one of them"):
        Limit.model_validate({"at_most": 0.05, "max": 0.05})


def test_unit_of_a_drop_stands_in_its_name() -> None:
    points = GateLimit(metric="accuracy", max_drop_points=2)
    assert (points.figure, points.limit, points.label) == ("accuracy_loss_points", Limit(max=2), "accuracy_loss_points")
    share = GateLimit(metric="accuracy", max_drop_relative=0.03, task="intent", slice={"language": "de"})
    assert (share.figure, share.limit) == ("accuracy_recovery", Limit(min=0.97))
    assert share.label == "accuracy_recovery (intent, language=de)"
    assert GateLimit(metric="accuracy", max_drop_points=2, vs="previous-release").scope == "vs previous-release"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"at_most": 1.0, "at_least": 0.0},
        {"max_drop_points": 2, "max_drop_relative": 0.02},
        {"max_drop": 2},
        {"at_most": math.nan},
        {"at_most": 1.0, "vs": "last"},
        {"at_most": 1.0, "min_items": 0},
        {"at_most": 1.0, "on_unsure": "pass"},
        {"at_most": 1.0, "waiver": {"reason": "x", "by": "y"}},
        {"at_most": 1.0, "waiver": {"reason": "", "by": "y", "until": "2027-01-31"}},
        {"at_most": 1.0, "waiver": {"reason": "x", "by": "y", "until": "soon"}},
    ],
)
def test_malformed_entries_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        GateLimit.model_validate({"metric": "mean_kl", **fields})
