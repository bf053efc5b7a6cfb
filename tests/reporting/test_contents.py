"""Everything that is handed over is shown: known sections in order, unknown ones too, figures of slices as one plot."""

from reports import CONTEXT, a_report, a_result

from quantpipe.reporting.contents import sections_of, slice_of
from quantpipe.reporting.exhibits import Intervals, Text
from quantpipe.reporting.report import ReportSection, report_of


def test_known_sections_come_in_order_and_unknown_ones_are_not_lost() -> None:
    ids = [section.id for section in sections_of(a_report())]
    assert ids == [
        "suite", "divergence", "layers", "coverage", "bench", "memory", "parity", "judges", "unlimited", "quantization",
        "recipe", "environment", "provenance", "reproduce",
    ]  # fmt: skip


def test_sections_of_one_id_are_joined() -> None:
    parts = [ReportSection("suite", "Suite", (Text((word,)),)) for word in ("one", "two")]
    [section] = report_of(a_result(), CONTEXT, sections=parts).sections
    assert section.exhibits == (Text(("one",)), Text(("two",)))


def test_figures_of_slices_are_one_plot_below_the_whole_with_its_limit() -> None:
    divergence = next(section for section in sections_of(a_report()) if section.id == "divergence")
    [plot] = [each for each in divergence.exhibits if isinstance(each, Intervals)]
    assert [row.label for row in plot.rows] == ["all", "domain=code", "domain=legal"]
    assert (plot.bound, plot.side) == (0.05, "max")


def test_slices_are_not_listed_again_among_what_has_no_limit() -> None:
    unlimited = next(section for section in sections_of(a_report()) if section.id == "unlimited")
    assert "p99_kl" in str(unlimited)
    assert "domain=code" not in str(unlimited)


def test_slices_are_read_from_names() -> None:
    assert slice_of("mean_kl[domain=x]") == ("mean_kl", "domain=x")
    assert slice_of("mean_kl") is None
    assert slice_of("[x]") is None
