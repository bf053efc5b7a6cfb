"""Pictures of a coverage, as PNG files. Knows plain counts, no model and no text but names of domains and languages."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from quantpipe.calibration.views.coverage import Coverage, Share
from quantpipe.quantize.activation_coverage import ActivationCoverage, InputCoverage
from quantpipe.quantize.channel_ranges import BeyondRange

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEXT_PLOT, BEYOND_PLOT, SATURATION_PLOT = "coverage-text.png", "coverage-beyond.png", "coverage-saturation.png"
PLOT_NAMES = (TEXT_PLOT, BEYOND_PLOT, SATURATION_PLOT)
MOST_BARS = 12
MOST_PANELS = 6
NAME_CHARS = 24
DPI = 110


def plot_text(coverage: Coverage, folder: Path) -> None:
    """Tokens by domain, language and length, into ``folder``."""
    figure = _figure(12, 0.6 + 0.34 * max(4, *(min(len(each), MOST_BARS) for each in _parts(coverage).values())))
    for number, (title, shares) in enumerate(_parts(coverage).items(), start=1):
        axes = figure.add_subplot(1, 3, number)
        shown = shares[:MOST_BARS]
        bars = axes.barh(range(len(shown)), [share.num_tokens for share in shown], color="#4878a8")
        axes.bar_label(bars, [f"{share.num_tokens / max(coverage.num_tokens, 1):.0%}" for share in shown], padding=3)
        axes.set_yticks(range(len(shown)), drawable([share.name for share in shown]))
        axes.invert_yaxis()
        axes.margins(x=0.18)
        axes.set(title=title, xlabel="tokens")
    _save(figure, folder / TEXT_PLOT)


def plot_beyond(coverage: ActivationCoverage, folder: Path) -> None:
    """The share of held-out values beyond the calibrated range, by block and kind of input, a panel for each domain."""
    domains = coverage.domains[:MOST_PANELS]
    columns = min(len(domains), 3)
    rows = -(-len(domains) // columns)
    figure = _figure(4.2 * columns, 3.4 * rows)
    for number, name in enumerate(drawable(domains)):
        axes = figure.add_subplot(rows, columns, number + 1)
        for role, by_block in _beyond_by_role(coverage, number).items():
            axes.plot(list(by_block), list(by_block.values()), marker=".", label=role)
        axes.axhline(coverage.expected_frac(number), color="black", linestyle="--", linewidth=1, label="expected")
        axes.set(title=f"held out: {name}", xlabel="block", ylabel="beyond the calibrated range")
        _percent(axes)
        axes.set_ylim(bottom=0)
        _whole_numbers(axes)
        if number == 0:
            axes.legend(fontsize="x-small")
    _save(figure, folder / BEYOND_PLOT)


def plot_saturation(coverage: ActivationCoverage, folder: Path) -> None:
    """How far the statistics of the first sequences are from those of all; the median over blocks of every input."""
    figure = _figure(10, 3.8)
    by_role: dict[str, list[InputCoverage]] = defaultdict(list)
    for each in coverage.inputs:
        by_role[each.role].append(each)
    for number, (title, key) in enumerate(
        (("Hessian's diagonal", "hessian_change"), ("largest magnitudes", "absmax_change")), start=1
    ):
        axes = figure.add_subplot(1, 2, number)
        for role, inputs in by_role.items():
            counts = [point.num_sequences for point in inputs[0].curve]
            changes = [median(getattr(each.curve[i], key) for each in inputs) for i in range(len(counts))]
            axes.plot(counts, changes, marker="o", label=role)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set(title=title, xlabel="sequences", ylabel="distance from those of all")
        _percent(axes)
        axes.set_ylim(bottom=0)
    figure.axes[0].legend(fontsize="x-small")
    _save(figure, folder / SATURATION_PLOT)


def drawable(names: Sequence[str]) -> list[str]:
    """Names as the plots' font can draw them: a number in place of those that it has no letters for."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    return [
        _shortened(name) if all(font.get_char_index(ord(letter)) for letter in name) else f"({number})"
        for number, name in enumerate(names, start=1)
    ]


def _parts(coverage: Coverage) -> Mapping[str, tuple[Share, ...]]:
    return {"domain": coverage.domains, "language": coverage.languages, "tokens in a document": coverage.lengths}


def _beyond_by_role(coverage: ActivationCoverage, domain: int) -> dict[str, dict[int, float]]:
    """Role -> block -> share; experts of a block are counted together."""
    counts: dict[str, dict[int, list[BeyondRange]]] = defaultdict(lambda: defaultdict(list))
    for each in coverage.inputs:
        counts[each.role][each.block].append(each.held_out[domain])
    return {
        role: {
            block: sum(part.num_beyond for part in parts) / max(sum(part.num_values for part in parts), 1)
            for block, parts in by_block.items()
        }
        for role, by_block in counts.items()
    }


def _shortened(name: str) -> str:
    # A dollar sign would begin a formula.
    short = name if len(name) <= NAME_CHARS else f"{name[: NAME_CHARS - 1]}..."
    return short.replace("$", r"\$")


def _figure(width: float, height: float) -> "Figure":
    """A figure of its own: nothing global is touched, and no display is looked for."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _whole_numbers(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _percent(axes: "Axes") -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _save(figure: "Figure", path: Path) -> None:
    partial = path.with_suffix(".partial")
    figure.savefig(partial, format="png", dpi=DPI)
    partial.replace(path)
