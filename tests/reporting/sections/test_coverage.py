"""The coverage of a run, with activations or without, as it was measured."""

from typing import Any

from reports import COVERAGE

from quantpipe.reporting.exhibits import Bars, Curves
from quantpipe.reporting.sections.coverage import coverage_section

CURVE = [{"num_sequences": n, "hessian_change": 0.5 / n, "absmax_change": 0.3 / n} for n in (1, 2, 4)]
INPUT = {"curve": CURVE, "held_out": [{"num_beyond": 3, "num_values": 60, "largest_ratio": 1.5}]}
ACTIVATIONS: dict[str, Any] = {"domains": ["manual"], "inputs": [INPUT, INPUT]}


def test_text_alone_has_bars_of_what_is_in_the_set() -> None:
    plots = {each.name: each for each in coverage_section(COVERAGE).exhibits if isinstance(each, Bars)}
    assert plots["Calibrated tokens by language"].bars[0].values == (1085.0,)
    assert plots["Held-out tokens whose id was calibrated on"].bars[0].values == (254 / 512,)


def test_activations_add_what_is_beyond_the_range_and_the_saturation() -> None:
    exhibits = coverage_section(COVERAGE | {"activations": ACTIVATIONS}).exhibits
    [beyond] = [each for each in exhibits if isinstance(each, Bars) and each.name.startswith("Held-out values beyond")]
    assert beyond.bars[0].values == (0.05,)
    [saturation] = [each for each in exhibits if isinstance(each, Curves)]
    assert [point.y for point in saturation.curves[0].points] == [0.5, 0.25, 0.125]


def test_a_run_without_coverage_has_none() -> None:
    assert coverage_section(None).exhibits == ()
