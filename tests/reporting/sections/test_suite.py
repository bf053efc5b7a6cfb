"""Scores keep their sides, flips are listed without texts, ties are marked where margins are known."""

from quantpipe.gate.report import ScoreRow
from quantpipe.reporting.exhibits import Bars, Table
from quantpipe.reporting.sections.suite import MOST_FLIPS, FlipRow, suite_section


def plots_of(*scores: ScoreRow) -> dict[str, Bars]:
    return {each.name: each for each in suite_section(scores).exhibits if isinstance(each, Bars)}


def test_bars_show_each_model_under_its_own_name() -> None:
    plot = plots_of(ScoreRow("law", 100, 80, 70, 12, 2))["Correct items"]
    assert dict(zip(plot.series, plot.bars[0].values, strict=True)) == {"candidate": 0.7, "baseline": 0.8}


def test_flips_are_shown_both_ways() -> None:
    plot = plots_of(ScoreRow("law", 100, 80, 70, 12, 2))["Flips, both ways"]
    assert dict(zip(plot.series, plot.bars[0].values, strict=True)) == {"gained": 2, "lost": 12}


def flips_table(*flips: FlipRow) -> Table:
    [*_, table] = suite_section((ScoreRow("law", 100, 80, 70, 12, 2),), flips).exhibits
    assert isinstance(table, Table)
    return table


def test_flipped_items_have_ids_slices_and_ties() -> None:
    table = flips_table(FlipRow("t", "a", "law", True, True, "c", {"language": "de"}), FlipRow("t", "b", "law", False))
    assert table.rows == (
        ("a", "t", "law", "lost", "yes", "c", "language de"),
        ("b", "t", "law", "gained", None, None, None),
    )
    assert table.note == "2 flips, 1 of them near ties. Texts are left out."


def test_ties_that_nobody_knows_of_are_not_counted_as_none() -> None:
    assert "by what margin is not known" in flips_table(FlipRow("t", "a", "law", True)).note


def test_very_many_flips_are_cut_and_it_is_said() -> None:
    table = flips_table(*(FlipRow("t", str(n), "law", True) for n in range(MOST_FLIPS + 1)))
    assert len(table.rows) == MOST_FLIPS
    assert f"The first {MOST_FLIPS} are listed." in table.note


def test_no_suite_is_no_exhibit() -> None:
    assert suite_section(()).exhibits == ()
