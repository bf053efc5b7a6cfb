"""What replies may take: read from the command line, and held against times."""

import pytest

from quantpipe.errors import RecipeError
from quantpipe.plan.burst import Times
from quantpipe.plan.slo import Slo, parse_slo


def test_both_limits_or_either_are_read() -> None:
    assert parse_slo("ttft_ms=500, tpot_ms=50") == Slo(500, 50)
    assert parse_slo("tpot_ms=12.5") == Slo(None, 12.5)
    assert not parse_slo("").is_asked


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpot=50", r"unknown 'tpot'; did you mean 'tpot_ms'\?"),
        ("tpot_ms", "tpot_ms: found ''; give milliseconds above 0"),
        ("tpot_ms=-5", "tpot_ms: found '-5'"),
        ("tpot_ms=nan", "tpot_ms: found 'nan'"),
        ("ttft_ms=1,ttft_ms=2", "ttft_ms is given twice"),
    ],
)
def test_anything_else_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=f"--slo: {message}"):
        parse_slo(text)


def test_both_limits_must_hold() -> None:
    times = Times(ttft_s=0.4, tpot_s=0.04, output_tok_s=1.0)
    assert Slo(400, 40).is_met(times)
    assert not Slo(399, None).is_met(times)
    assert not Slo(None, 39).is_met(times)
