"""Which names may be limited."""

import pytest

from quantpipe.gate.metrics import METRICS, concurrency_of, is_known_metric, known_metric_names, metric_of


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("mean_kl", True),
        ("output_tok_s_ratio_c8", True),
        ("ttft_ratio_c128", True),
        ("ttft_ratio", False),  # without a concurrency it names nothing measured
        ("ttft_ratio_c0", False),
        ("ttft_ratio_c08", False),
        ("ttft_ratio_c", False),
        ("mean_kl_c8", False),
        ("ttft_ratio_c1_c8", False),
        ("", False),
    ],
)
def test_metric_names(name: str, known: bool) -> None:
    assert is_known_metric(name) is known


def test_every_offered_name_is_known_and_every_metric_is_offered() -> None:
    names = known_metric_names((1, 16))
    assert all(is_known_metric(name) for name in names)
    assert {metric_of(name) for name in names} == set(METRICS.values())
    assert concurrency_of("ttft_ratio_c16") == 16
    assert concurrency_of("mean_kl") is None
