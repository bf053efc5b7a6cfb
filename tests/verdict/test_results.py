"""From items, windows and rounds to the verdict: the figure of each limit, whole or in part, and closed failures."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from read_windows import window, windows
from suite_items import comparison, flipped

from quantpipe.errors import RecipeError
from quantpipe.evaluate.comparison import Comparison
from quantpipe.gate.judge import GateResult, Measurement, Verdict
from quantpipe.gate.limits import GateLimit
from quantpipe.recipe.schema import Recipe
from quantpipe.verdict.results import Results, judge_results

GERMAN = flipped(200, 12, slices={"language": "de"})
ENGLISH = flipped(400, 0, slices={"language": "en"})
BOTH = Comparison(GERMAN.pairs + ENGLISH.pairs)
WINDOWS = windows(8)
NO_NUMBER = window(replace(WINDOWS[0].row, mean_kl=math.nan))


def judged(gate: object, results: Results, **sections: object) -> GateResult:
    plain = {"version": 1, "name": "x", "model": {"source": "m"}, "gate": gate, "output": Path("out")}
    return judge_results(Recipe.model_validate(plain | sections), results)


def test_loss_that_the_whole_suite_hides_fails_its_slice() -> None:
    results = Results(comparison=BOTH, num_items=600)
    whole = {"metric": "accuracy", "max_drop_points": 4.0}
    assert judged([whole], results).verdict is Verdict.PASS
    result = judged([whole, whole | {"slice": {"language": "de"}}], results)
    assert [check.verdict for check in result.checks] == [Verdict.PASS, Verdict.UNSURE]
    assert result.checks[1].entry.label == "accuracy_loss_points (language=de)"
    assert judged([{**whole, "max_drop_points": 2.0, "slice": {"language": "de"}}], results).verdict is Verdict.FAIL


def test_each_kind_of_bound_is_measured() -> None:
    results = Results(comparison=BOTH, windows=WINDOWS, bench={"ttft_ratio_c1": ((1.0, 1.1), (1.0, 1.12))})
    gate = [
        {"metric": "accuracy", "max_drop_relative": 0.05},
        {"metric": "accuracy", "at_least": 0.9, "vs": "absolute"},
        {"metric": "mean_kl", "at_most": 0.05},
        {"metric": "ttft_ratio_c1", "at_most": 1.5},
    ]
    result = judged(gate, results)
    assert [check.metric for check in result.checks] == ["accuracy_recovery", "accuracy", "mean_kl", "ttft_ratio_c1"]
    assert result.verdict is Verdict.PASS
    assert {m.name for m in result.informational} == {
        "accuracy_loss_points", "perplexity_ratio", "top1_agreement", "p99_kl"
    }  # fmt: skip


def test_mapping_and_list_say_the_same() -> None:
    results = Results(comparison=BOTH, windows=WINDOWS)
    mapping = judged({"accuracy_loss_points": {"max": 4.0}, "mean_kl": {"at_most": 0.05}}, results)
    entries = [{"metric": "accuracy_loss_points", "at_most": 4.0}, {"metric": "mean_kl", "at_most": 0.05}]
    assert judged(entries, results) == mapping


def test_task_or_slice_that_nobody_has_is_refused_at_its_key() -> None:
    limit = {"metric": "accuracy", "max_drop_points": 4.0}
    with pytest.raises(RecipeError, match=r"^gate\[1\]\.slice: no item has language 'fr' \(its values: de, en\)"):
        judged([limit, limit | {"slice": {"language": "fr"}}], Results(comparison=BOTH))
    with pytest.raises(RecipeError, match=r"^gate\[0\]\.task: no item is of task 'faq'"):
        judged([limit | {"task": "faq"}], Results(comparison=BOTH))


@pytest.mark.parametrize(
    ("gate", "results", "reason"),
    [
        ({"mean_kl": {"max": 1.0}}, Results(comparison=BOTH), "not measured"),
        ({"accuracy_loss_points": {"max": 99.0}}, Results(windows=WINDOWS), "not measured"),
        ({"accuracy_loss_points": {"max": 99.0}}, Results(comparison=BOTH, num_items=601), "600 items; at least 601"),
        ({"mean_kl": {"max": 1.0}}, Results(windows=WINDOWS, num_windows=9), "8 windows; at least 9"),
        ({"accuracy_loss_points": {"max": 99.0}}, Results(comparison=flipped(19, 0)), "19 items; at least 20"),
        (
            {"accuracy_loss_points": {"max": 99.0}},
            Results(comparison=comparison([1.0] * 30, [math.nan] * 30)),
            "a score is nan",
        ),
        (
            {"accuracy_loss_points": {"max": 99.0}},
            Results(comparison=flipped(30, 0, cluster_size=30)),
            "1 independent clusters",
        ),
        ({"accuracy_recovery": {"min": 0.1}}, Results(comparison=comparison([0.0] * 30, [1.0] * 30)), "value is nan"),
        (
            {"mean_kl": {"max": 1.0}},
            Results(windows=(NO_NUMBER, *WINDOWS)),
            "value is nan",
        ),
    ],
)
def test_what_is_missing_not_a_number_or_too_few_fails(gate: object, results: Results, reason: str) -> None:
    result = judged(gate, results)
    assert result.verdict is Verdict.FAIL
    assert reason in result.checks[0].reason and result.checks[0].reason.startswith("cannot be judged")


def test_slice_with_fewer_items_than_asked_for_fails_though_nothing_flipped() -> None:
    limit = {"metric": "accuracy", "max_drop_points": 50.0, "slice": {"language": "en"}, "min_items": 401}
    result = judged([limit | {"on_unsure": "warn"}], Results(comparison=BOTH))
    assert result.verdict is Verdict.FAIL
    assert "only 400 items; at least 401 are needed" in result.checks[0].reason


def test_files_that_differ_from_their_manifest_fail_unasked() -> None:
    faults = Measurement("manifest_mismatches", 1, 1, 1, 0.99, 40, "count", "x")
    result = judged({"mean_kl": {"max": 1.0}}, Results(windows=WINDOWS, mismatches=faults))
    assert [check.metric for check in result.checks] == ["mean_kl", "manifest_mismatches"]
    assert result.verdict is Verdict.FAIL


def test_intervals_widen_with_the_confidence_in_every_metric() -> None:
    results = Results(comparison=BOTH, windows=WINDOWS, bench={"ttft_ratio_c1": ((1.0, 1.1), (1.0, 1.12))})
    for narrow, wide in zip(results.measurements(0.9), results.measurements(0.98), strict=True):
        assert wide.low < narrow.low and wide.high > narrow.high and wide.value == narrow.value, narrow.name


def test_against_an_earlier_release_its_items_count() -> None:
    limit = GateLimit(metric="accuracy", max_drop_points=3.0, vs="previous-release")
    assert Results(comparison=BOTH).measure(limit) == "not measured"
    found = Results(comparison=BOTH, previous=flipped(600, 30)).measure(limit)
    assert isinstance(found, Measurement) and found.value == pytest.approx(5.0)


def test_perplexity_below_the_baseline_does_not_hide_a_distance() -> None:
    better = tuple(window(replace(each.row, cand_nll=2.9, mean_kl=0.4)) for each in WINDOWS)
    result = judged({"perplexity_ratio": {"max": 1.05}, "mean_kl": {"max": 0.05}}, Results(windows=better))
    assert [check.verdict for check in result.checks] == [Verdict.PASS, Verdict.FAIL]


CHINESE = windows(8, 0.2, {"domain": "chinese", "language": "zh"})
BY_DOMAIN = (*windows(8, 0.02, {"domain": "code"}), *CHINESE)


@pytest.mark.parametrize(
    "gate",
    [
        {"mean_kl[domain=code]": {"max": 0.1}, "mean_kl[domain=chinese]": {"max": 0.1}},
        [
            {"metric": "mean_kl", "slice": {"domain": "code"}, "at_most": 0.1},
            {"metric": "mean_kl", "slice": {"domain": "chinese"}, "at_most": 0.1},
        ],
    ],
)
def test_slice_of_held_out_text_is_limited_in_both_forms(gate: object) -> None:
    result = judged(gate, Results(windows=BY_DOMAIN, num_windows=16))
    assert [(check.metric, check.verdict) for check in result.checks] == [
        ("mean_kl[domain=code]", Verdict.PASS),
        ("mean_kl[domain=chinese]", Verdict.FAIL),
    ]
    names = {m.name for m in result.informational}
    assert "worst_domain_kl" in names and not names & {check.metric for check in result.checks}


def test_slice_may_have_several_fields() -> None:
    both = [{"metric": "p99_kl", "slice": {"domain": "chinese", "language": "zh"}, "at_most": 0.5}]
    assert judged(both, Results(windows=BY_DOMAIN)).checks[0].verdict is Verdict.PASS


def test_slice_of_items_is_limited_by_name_too() -> None:
    result = judged({"accuracy_loss_points[language=de]": {"max": 2.0}}, Results(comparison=BOTH))
    assert (result.checks[0].entry.label, result.verdict) == ("accuracy_loss_points (language=de)", Verdict.FAIL)


def test_intervals_of_slices_widen_with_the_number_of_checks() -> None:
    results = Results(windows=BY_DOMAIN)
    gate = {"mean_kl[domain=chinese]": {"max": 0.2036}, "worst_domain_kl": {"max": 0.2036}}
    alone, corrected = judged(gate, results), judged(gate, results, correction="holm")
    for narrow, wide in zip(alone.checks, corrected.checks, strict=True):
        assert narrow.measurement is not None and wide.measurement is not None
        assert wide.measurement.confidence == pytest.approx(0.95) and wide.measurement.high > narrow.measurement.high


def test_slice_that_no_window_has_is_refused_at_its_key() -> None:
    results = Results(windows=BY_DOMAIN)
    entry = {"metric": "mean_kl", "at_most": 1.0, "slice": {"domain": "prose"}}
    with pytest.raises(RecipeError, match=r"^gate\[0\]\.slice: no window has domain 'prose' \(its values: "):
        judged([entry], results)
    with pytest.raises(RecipeError, match=r"^gate: mean_kl\[domain=prose\]: no window has domain 'prose'"):
        judged({"mean_kl[domain=prose]": {"max": 1.0}}, results)
    with pytest.raises(RecipeError, match=r"no window has domain 'code' and language 'zh' together"):
        judged([entry | {"slice": {"domain": "code", "language": "zh"}}], results)


def test_bound_of_a_stored_baseline_is_never_judged_as_the_exact_figure() -> None:
    stored = Results(windows=WINDOWS, top_k=128)
    assert judged({"mean_kl": {"max": 1.0}}, stored).checks[0].reason == "cannot be judged: not measured"
    assert judged({"mean_kl_topk": {"max": 1.0}}, stored).verdict is Verdict.PASS
    assert judged({"mean_kl_topk": {"max": 1.0}}, Results(windows=WINDOWS)).verdict is Verdict.FAIL


def test_prompts_that_are_read_as_other_tokens_fail_unasked() -> None:
    other = Measurement("prompt_mismatches", 2, 2, 2, 0.99, 40, "count", "x")
    result = judged({"mean_kl": {"max": 1.0}}, Results(windows=WINDOWS, prompts=other))
    assert [check.verdict for check in result.checks] == [Verdict.PASS, Verdict.FAIL]
    allowed = {"mean_kl": {"max": 1.0}, "prompt_mismatches": {"max": 2}}
    assert judged(allowed, Results(windows=WINDOWS, prompts=other)).verdict is Verdict.PASS
