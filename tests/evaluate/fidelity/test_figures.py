"""Slices of windows: exact figures, names a limit may be set on, and the worst domain."""

import math

import numpy as np
import pytest

from quantpipe.evaluate.divergence import DivergenceResult, measure_divergence
from quantpipe.gate.judge import Measurement, Verdict, judge, measurement_problem
from quantpipe.gate.limits import Limit
from quantpipe.gate.metrics import is_known_metric
from quantpipe.gate.slice_names import split_name
from tests.evaluate.conftest import VOCAB_SIZE, BigramEngine, random_table

DOMAINS = ("law", "law", "law", "law", "law", "chat", "chat", "chat", "chat", "chat", "notes")


@pytest.fixture(scope="module")
def result() -> DivergenceResult:
    """Windows of chat hold tokens below 64, whose predictions are left as they are; others hold the rest."""
    base_VV, generator = random_table(1), np.random.default_rng(4)
    cand_VV = base_VV.copy()
    cand_VV[64:] += generator.normal(size=(64, VOCAB_SIZE)) * 0.5
    windows = [generator.integers(*((0, 64) if name == "chat" else (64, 128)), size=24).tolist() for name in DOMAINS]
    slices = [{"domain": name} | ({"language": "de"} if name != "notes" else {}) for name in DOMAINS]
    return measure_divergence(BigramEngine(base_VV), BigramEngine(cand_VV), windows, slices=slices)


def named(result: DivergenceResult, name: str) -> Measurement:
    [found] = [each for each in result.measurements if each.name == name]
    return found


def test_each_slice_has_the_figures_of_its_own_windows(result: DivergenceResult) -> None:
    law = named(result, "mean_kl[domain=law]")
    assert law.value == pytest.approx(np.mean([each.row.mean_kl for each in result.windows[:5]]))
    assert (law.num_samples, named(result, "mean_kl").num_samples) == (5, 11)
    assert named(result, "mean_kl[domain=chat]").value == 0.0 == named(result, "p99_kl[domain=chat]").high
    assert named(result, "perplexity_ratio[domain=chat]").value == 1.0
    assert named(result, "top1_agreement[domain=law]").value < 1.0 == named(result, "top1_agreement[domain=chat]").value
    assert named(result, "mean_kl[language=de]").value == pytest.approx(law.value / 2)


def test_slices_also_have_a_median_and_a_largest_kl(result: DivergenceResult) -> None:
    rows = {(row.field, row.value): row for row in result.slices}
    assert list(rows) == [("domain", "chat"), ("domain", "law"), ("domain", "notes"), ("language", "de")]
    law = rows["domain", "law"]
    assert law.max_kl == max(each.row.max_kl for each in result.windows[:5])
    assert 0 < law.median_kl < law.max_kl
    assert (rows["domain", "chat"].max_kl, rows["domain", "notes"].num_windows) == (0.0, 1)


def test_the_gate_knows_every_name_and_accepts_slices_of_enough_windows(result: DivergenceResult) -> None:
    for each in result.measurements:
        assert is_known_metric(each.name), each.name
        _, fields = split_name(each.name) or ("", {"domain": "notes"})
        if fields.get("domain") != "notes" and each.name != "worst_domain_kl":
            assert measurement_problem(each) is None
    limits = {"mean_kl[domain=chat]": Limit(max=0.01), "mean_kl[domain=law]": Limit(max=0.01)}
    checks = judge(limits, result.measurements).checks
    assert [check.verdict for check in checks] == [Verdict.PASS, Verdict.FAIL]


def test_one_window_has_no_interval_and_decides_nothing(result: DivergenceResult) -> None:
    for name in ("mean_kl", "p99_kl", "perplexity_ratio", "top1_agreement"):
        alone = named(result, f"{name}[domain=notes]")
        assert (alone.low, alone.high) == (-math.inf, math.inf)
        assert measurement_problem(alone) == "only 1 window; at least 5 are needed"


def test_the_worst_domain_is_named_and_bounds_them_all(result: DivergenceResult) -> None:
    worst = named(result, "worst_domain_kl")
    assert worst.value == max(named(result, f"mean_kl[domain={name}]").value for name in ("law", "chat", "notes"))
    assert worst.high == math.inf and worst.num_samples == 1  # a domain with one window is never held to be fine
    assert result.measurements[-1] is worst


def test_windows_without_fields_have_no_slices() -> None:
    engine = BigramEngine(random_table(1))
    windows = np.random.default_rng(9).integers(0, VOCAB_SIZE, size=(5, 24)).tolist()
    names = [each.name for each in measure_divergence(engine, engine, windows).measurements]
    assert names == ["perplexity_ratio", "mean_kl", "top1_agreement", "p99_kl"]


def test_what_has_no_slices_has_no_sliced_name() -> None:
    assert not is_known_metric("worst_domain_kl[domain=law]")
    assert not is_known_metric("ttft_ratio_c8[domain=law]")
    assert not is_known_metric("manifest_mismatches[domain=law]")
    assert not is_known_metric("mean_kl[domain")
