"""The gate's decisions: the three values, the closed failures, and the advice beside UNSURE."""

import math
import subprocess
import sys
from datetime import date

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quantpipe.errors import RecipeError
from quantpipe.gate.judge import Check, Measurement, Verdict, judge, judge_limits, overall, samples_to_decide
from quantpipe.gate.limits import GateLimit, Limit, limit_problem
from quantpipe.gate.metrics import metric_of

REASONABLE = st.floats(-1e6, 1e6)


def measured(
    name: str = "mean_kl",
    value: float = 0.03,
    low: float = 0.02,
    high: float = 0.04,
    confidence: float = 0.9,
    num_samples: int = 16,
    unit: str | None = None,
) -> Measurement:
    metric = metric_of(name)
    return Measurement(
        name,
        value,
        low,
        high,
        confidence,
        num_samples,
        unit if unit is not None else metric.unit if metric else "ratio",
    )


def verdict_of(limit: Limit, measurement: Measurement) -> Verdict:
    return judge({measurement.name: limit}, [measurement]).verdict


@given(limit=REASONABLE, ends=st.tuples(REASONABLE, REASONABLE, REASONABLE).map(sorted))
def test_max_passes_only_if_the_whole_interval_is_inside_and_fails_only_if_all_is_outside(
    limit: float, ends: list[float]
) -> None:
    low, value, high = ends
    verdict = verdict_of(Limit(max=limit), measured(value=value, low=low, high=high))
    assert (verdict is Verdict.PASS) == (high <= limit)
    assert (verdict is Verdict.FAIL) == (low > limit)
    assert (verdict is Verdict.UNSURE) == (low <= limit < high)


@given(limit=REASONABLE, ends=st.tuples(REASONABLE, REASONABLE, REASONABLE).map(sorted))
def test_min_mirrors_max(limit: float, ends: list[float]) -> None:
    low, value, high = ends
    mirrored = measured("mean_kl", value=-value, low=-high, high=-low)
    verdict = verdict_of(Limit(min=limit), measured("top1_agreement", value=value, low=low, high=high))
    assert verdict is verdict_of(Limit(max=-limit), mirrored)


@given(
    limit=REASONABLE,
    ends=st.tuples(REASONABLE, REASONABLE, REASONABLE).map(sorted),
    by=st.floats(0, 1e6),
)
def test_a_looser_limit_never_judges_worse(limit: float, ends: list[float], by: float) -> None:
    rank = {Verdict.FAIL: 0, Verdict.UNSURE: 1, Verdict.PASS: 2}
    low, value, high = ends
    measurement = measured(value=value, low=low, high=high)
    tight, loose = verdict_of(Limit(max=limit), measurement), verdict_of(Limit(max=limit + by), measurement)
    assert rank[tight] <= rank[loose]


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [(0.04, Verdict.PASS), (0.02, Verdict.UNSURE), (0.0399, Verdict.UNSURE), (0.0199, Verdict.FAIL)],
)
def test_a_limit_at_the_upper_end_passes_and_at_the_lower_end_is_unsure(limit: float, verdict: Verdict) -> None:
    assert verdict_of(Limit(max=limit), measured(value=0.03, low=0.02, high=0.04)) is verdict


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [(0.9, Verdict.PASS), (0.95, Verdict.UNSURE), (0.96, Verdict.FAIL)],
)
def test_min_limits_at_the_ends(limit: float, verdict: Verdict) -> None:
    measurement = measured("top1_agreement", value=0.92, low=0.9, high=0.95)
    assert verdict_of(Limit(min=limit), measurement) is verdict


def test_base_against_itself_passes_the_tightest_limits() -> None:
    same = [
        measured("perplexity_ratio", 1.0, 1.0, 1.0),
        measured("mean_kl", 0.0, 0.0, 0.0),
        measured("top1_agreement", 1.0, 1.0, 1.0),
    ]
    limits = {"perplexity_ratio": Limit(max=1.0), "mean_kl": Limit(max=0.0), "top1_agreement": Limit(min=1.0)}
    assert judge(limits, same).verdict is Verdict.PASS


def test_a_hair_of_rounding_outside_the_interval_is_forgiven_but_never_turns_a_pass() -> None:
    measurement = measured("perplexity_ratio", value=1.0 + 1e-12, low=1.0, high=1.0)
    assert verdict_of(Limit(max=1.1), measurement) is Verdict.PASS
    assert verdict_of(Limit(max=1.0), measurement) is not Verdict.PASS


@pytest.mark.parametrize(
    ("measurement", "reason"),
    [
        (measured(value=math.nan), "the value is nan"),
        (measured(value=math.inf, high=math.inf), "the value is inf"),
        (measured(low=math.nan), "the interval is not a number"),
        (measured(high=math.nan), "the interval is not a number"),
        (measured(low=0.04, high=0.02), "inverted"),
        (measured(value=0.05), "does not contain the value"),
        (measured(value=0.01), "does not contain the value"),
        (measured(confidence=0.5), "confidence is 0.5"),
        (measured(confidence=1.0), "confidence is 1"),
        (measured(confidence=math.nan), "confidence is nan"),
        (measured(num_samples=4), "4 windows; at least 5"),
        (measured(num_samples=0), "0 windows"),
        (measured(unit="bits"), "measured in 'bits', the limit is in 'nats'"),
    ],
)
def test_what_cannot_be_judged_fails_with_the_reason(measurement: Measurement, reason: str) -> None:
    result = judge({"mean_kl": Limit(max=1e9)}, [measurement])
    assert result.verdict is Verdict.FAIL
    assert reason in result.checks[0].reason
    assert result.checks[0].measurement is measurement


def test_a_missing_metric_fails() -> None:
    result = judge({"mean_kl": Limit(max=1.0)}, [measured("top1_agreement", 0.9, 0.8, 0.95)])
    assert result.verdict is Verdict.FAIL
    assert "not measured" in result.checks[0].reason
    assert result.checks[0].measurement is None
    assert [m.name for m in result.informational] == ["top1_agreement"]


def test_a_metric_measured_twice_fails_even_if_both_would_pass() -> None:
    result = judge({"mean_kl": Limit(max=1.0)}, [measured(), measured()])
    assert result.verdict is Verdict.FAIL
    assert "measured 2 times" in result.checks[0].reason


def test_fewer_samples_than_declared_fail() -> None:
    items = measured("accuracy_loss_points", 0.0, -1.0, 1.0, num_samples=179)
    limits = {"accuracy_loss_points": Limit(max=5.0)}
    assert judge(limits, [items], {"accuracy_loss_points": 179}).verdict is Verdict.PASS
    short = judge(limits, [items], {"accuracy_loss_points": 180})
    assert short.verdict is Verdict.FAIL
    assert "179 items; at least 180" in short.checks[0].reason


def test_a_limit_on_the_harmless_side_fails_instead_of_passing_everything() -> None:
    result = judge({"mean_kl": Limit(min=0.01)}, [measured()])
    assert result.verdict is Verdict.FAIL
    assert "must be a max" in result.checks[0].reason
    assert limit_problem("output_tok_s_ratio_c8", Limit(max=1.0)) == "higher is better, so the limit must be a min"


def test_an_unknown_metric_fails() -> None:
    assert judge({"vibes": Limit(max=1.0)}, [measured("vibes")]).verdict is Verdict.FAIL


def test_a_gate_without_limits_is_refused() -> None:
    with pytest.raises(RecipeError, match="no limits"):
        judge({}, [measured()])


def test_one_failing_check_decides_over_unsure_and_pass() -> None:
    failing = measured("mean_kl", 0.5, 0.4, 0.6)
    unsure = measured("top1_agreement", 0.9, 0.8, 1.0)
    passing = measured("perplexity_ratio", 1.0, 0.99, 1.01)
    limits = {
        "perplexity_ratio": Limit(max=1.05),
        "top1_agreement": Limit(min=0.85),
        "mean_kl": Limit(max=0.05),
    }
    result = judge(limits, [failing, unsure, passing])
    assert [check.verdict for check in result.checks] == [Verdict.PASS, Verdict.UNSURE, Verdict.FAIL]
    assert result.verdict is Verdict.FAIL
    del limits["mean_kl"]
    assert judge(limits, [failing, unsure, passing]).verdict is Verdict.UNSURE


@given(st.lists(st.sampled_from(Verdict)))
def test_overall_is_the_worst_and_nothing_never_passes(verdicts: list[Verdict]) -> None:
    assert (overall(verdicts) is Verdict.PASS) == (set(verdicts) == {Verdict.PASS})
    assert (overall(verdicts) is Verdict.FAIL) == (Verdict.FAIL in verdicts or not verdicts)


def test_exit_codes_are_the_documented_ones() -> None:
    assert {verdict.value: verdict.exit_code for verdict in Verdict} == {"PASS": 0, "FAIL": 4, "UNSURE": 5}


def test_no_interval_is_unsure_and_says_so() -> None:
    one_repeat = measured("ttft_ratio_c1", 0.5, -math.inf, math.inf, num_samples=1)
    result = judge({"ttft_ratio_c1": Limit(max=1.0)}, [one_repeat])
    assert result.verdict is Verdict.UNSURE
    assert "no interval could be computed from 1 repeat;" in result.checks[0].reason


def test_an_interval_open_on_the_harmless_side_still_decides() -> None:
    assert verdict_of(Limit(max=0.05), measured(low=-math.inf, high=0.04)) is Verdict.PASS


def test_unsure_says_how_many_samples_would_decide() -> None:
    # half-width 2 points at 180 items, 1 point from the limit: 2^2 times as many items halve it twice over
    loss = measured("accuracy_loss_points", 4.0, 2.0, 6.0, num_samples=180)
    result = judge({"accuracy_loss_points": Limit(max=5.0)}, [loss])
    assert result.verdict is Verdict.UNSURE
    assert "roughly 720 items" in result.checks[0].reason


@given(
    value=st.floats(-10, 10),
    half=st.floats(0.01, 10),
    limit=st.floats(-10, 10),
    num_samples=st.integers(20, 10_000),
)
def test_the_advised_number_of_samples_really_decides(
    value: float, half: float, limit: float, num_samples: int
) -> None:
    assume(abs(limit - value) > 1e-3)
    bound = Limit(max=limit)
    measurement = measured("accuracy_loss_points", value, value - half, value + half, num_samples=num_samples)
    assume(verdict_of(bound, measurement) is Verdict.UNSURE)
    advised = samples_to_decide(bound, measurement)
    if advised is None:
        assert num_samples * (half / abs(limit - value)) ** 2 > 1e6
        return
    assert advised > num_samples
    shrunk = half * math.sqrt(num_samples / (advised * 1.001 + 1))
    later = measured("accuracy_loss_points", value, value - shrunk, value + shrunk, num_samples=advised)
    assert verdict_of(bound, later) is not Verdict.UNSURE


def test_a_value_on_the_limit_gets_no_number() -> None:
    on_it = measured("accuracy_loss_points", 5.0, 3.0, 7.0, num_samples=180)
    assert samples_to_decide(Limit(max=5.0), on_it) is None
    assert "too close" in judge({"accuracy_loss_points": Limit(max=5.0)}, [on_it]).checks[0].reason


def test_importing_the_gate_loads_neither_torch_nor_rich() -> None:
    code = (
        "import sys, quantpipe.gate.judge, quantpipe.gate.limits, quantpipe.gate.record, quantpipe.gate.report;"
        "print([m for m in ('torch', 'rich', 'transformers', 'scipy', 'numpy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


TODAY = date(2026, 12, 1)


def waived(until: str = "2026-12-31", **bound: object) -> GateLimit:
    waiver = {"reason": "fixed in the next release", "by": "ann", "until": until}
    return GateLimit.model_validate({"metric": "mean_kl", "waiver": waiver, **(bound or {"at_most": 0.01})})


def check_of(entry: GateLimit, found: Measurement | str | None = None) -> Check:
    measurement = found if found is not None else measured()
    return judge_limits([entry], lambda _entry, _confidence: measurement, today=TODAY).checks[0]


def test_waived_fail_passes_with_its_reason_and_date_and_is_no_plain_pass() -> None:
    result = judge_limits([waived()], lambda _entry, _confidence: measured(), today=TODAY)
    assert (result.verdict, result.title) == (Verdict.PASS, "PASS with waivers")
    (check,) = result.checks
    assert (check.verdict, check.outcome, check.is_waived) == (Verdict.FAIL, "FAIL (waived)", True)
    assert "waived by ann until 2026-12-31: fixed in the next release" in check.reason


def test_waiver_counts_on_its_last_day_and_not_after_it() -> None:
    assert check_of(waived("2026-12-01")).is_waived
    ended = check_of(waived("2026-11-30"))
    assert (ended.is_waived, ended.counted) == (False, Verdict.FAIL)
    assert "the waiver by ann ended on 2026-11-30 and no longer counts" in ended.reason


def test_undecided_limit_is_waived_too_and_a_needless_waiver_says_so() -> None:
    assert check_of(waived(at_most=0.03)).outcome == "UNSURE (waived)"
    passed = check_of(waived(at_most=0.05))
    assert (passed.outcome, passed.is_waived) == ("PASS", False)
    assert passed.reason.endswith("the waiver is not needed")


@pytest.mark.parametrize("found", ["not measured", measured(value=math.nan), measured(num_samples=2)])
def test_what_cannot_be_judged_is_never_waived_nor_only_warned_of(found: Measurement | str) -> None:
    check = check_of(waived(), found)
    assert (check.counted, check.is_waived) == (Verdict.FAIL, False)
    assert "what cannot be judged is not waived" in check.reason
    assert check_of(GateLimit(metric="mean_kl", at_most=0.05, on_unsure="warn"), found).counted is Verdict.FAIL


def test_unsure_that_only_warns_lets_a_release_pass_and_fail_does_not() -> None:
    unsure = GateLimit(metric="mean_kl", at_most=0.03, on_unsure="warn")
    result = judge_limits([unsure], lambda _entry, _confidence: measured())
    assert (result.verdict, result.title, result.checks[0].outcome) == (
        Verdict.PASS, "PASS with warnings", "UNSURE (warns)",
    )  # fmt: skip
    assert check_of(GateLimit(metric="mean_kl", at_most=0.01, on_unsure="warn")).counted is Verdict.FAIL


def test_fewer_items_than_a_limit_asks_for_fail_and_it_cannot_ask_for_less_than_the_metric() -> None:
    found = measured("accuracy_loss_points", 0.0, -0.1, 0.1, num_samples=99)
    asked = {"metric": "accuracy", "max_drop_points": 5.0, "slice": {"language": "de"}}
    few = check_of(GateLimit.model_validate(asked | {"min_items": 100}), found)
    assert few.verdict is Verdict.FAIL and "only 99 items; at least 100 are needed" in few.reason
    assert check_of(GateLimit.model_validate(asked | {"min_items": 99}), found).verdict is Verdict.PASS
    tiny = measured("accuracy_loss_points", 0.0, -0.1, 0.1, num_samples=19)
    assert check_of(GateLimit.model_validate(asked | {"min_items": 2}), tiny).verdict is Verdict.FAIL


def by_width(entry: GateLimit, confidence: float) -> Measurement:
    """A figure of 0.03 whose interval grows with the confidence: by 0.01 at 90 %, more above."""
    half = 0.01 * (1 - math.log10((1 - confidence) / 0.1))
    return measured(entry.figure, 0.03, 0.03 - half, 0.03 + half, confidence)


def test_holm_widens_the_intervals_of_many_limits_and_narrows_again_as_they_are_decided() -> None:
    close, clear = GateLimit(metric="mean_kl", at_most=0.0415), GateLimit(metric="perplexity_ratio", at_most=0.09)
    far = GateLimit(metric="top1_agreement", at_least=0.031)  # undecided at any confidence
    plain = judge_limits([close, clear, far], by_width)
    assert [check.verdict for check in plain.checks] == [Verdict.PASS, Verdict.PASS, Verdict.UNSURE]
    holm = judge_limits([close, clear, far], by_width, correction="holm")
    assert [check.verdict for check in holm.checks] == [Verdict.UNSURE, Verdict.PASS, Verdict.UNSURE]
    confidences = [check.measurement.confidence for check in holm.checks if check.measurement]
    assert confidences == pytest.approx([1 - 0.1 / 2, 1 - 0.1 / 3, 1 - 0.1 / 2])  # two shared the level at last
    alone = judge_limits([close], by_width, correction="holm")
    assert alone.checks[0].verdict is Verdict.PASS


@given(st.lists(st.floats(0.001, 0.1), min_size=1, max_size=6))
def test_holm_never_decides_what_a_limit_alone_leaves_undecided(bounds: list[float]) -> None:
    limits = [GateLimit(metric="mean_kl", at_most=bound) for bound in bounds]
    plain = judge_limits(limits, by_width).checks
    for one, corrected in zip(plain, judge_limits(limits, by_width, correction="holm").checks, strict=True):
        assert corrected.verdict in (one.verdict, Verdict.UNSURE)
