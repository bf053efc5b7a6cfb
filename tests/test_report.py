import pytest

from quantpipe.report import Reporter, no_progress


def test_progress_passes_every_item_through() -> None:
    assert list(no_progress(iter("abc"), 3, "letters")) == ["a", "b", "c"]
    assert list(Reporter(quiet=True).progress(iter("abc"), 3, "letters")) == ["a", "b", "c"]


def test_standard_output_is_left_to_results(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter()
    reporter.stage("quantize [all] of it")
    reporter.note("a detail [with brackets]")
    list(reporter.progress(range(2), 2, "blocks"))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "a detail [with brackets]" in captured.err
    assert "blocks: 2 in" in captured.err
    assert "quantize [all] of it" in captured.err
