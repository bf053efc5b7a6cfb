"""How far the candidate's distributions are from the baseline's: over all the text, and window by window."""

from collections.abc import Sequence
from dataclasses import dataclass

from quantpipe.reporting.exhibits import Bar, Bars, Curve, Curves, Exhibit, Facts, Point
from quantpipe.reporting.report import ReportSection


@dataclass(frozen=True)
class WindowKL:
    """A window of held-out text: where it is from, and the mean and the largest KL over its positions, in nats."""

    domain: str
    mean_kl: float
    max_kl: float


def divergence_section(
    facts: Sequence[tuple[str, str]],
    windows: Sequence[WindowKL] = (),
    positions: Sequence[tuple[int, float, float, float]] = (),
) -> ReportSection:
    """The divergence; where none was measured it has no exhibits.

    ``positions``: the most tokens of text before, and the mean KL there with its interval, in nats.
    """
    exhibits: list[Exhibit] = [Facts(tuple(facts))] if facts else []
    if windows:
        exhibits.append(_by_window(windows))
    if len(positions) > 1:
        curve = Curve("mean KL", tuple(Point(float(last), mean, low, high) for last, mean, low, high in positions))
        exhibits.append(Curves("KL by tokens before", "tokens before", "mean KL, nats", (curve,), is_log_x=True))
    return ReportSection("divergence", "Divergence", tuple(exhibits))


def _by_window(windows: Sequence[WindowKL]) -> Bars:
    seen: dict[str, int] = {}
    bars = []
    for window in sorted(windows, key=lambda each: each.domain):
        seen[window.domain] = seen.get(window.domain, 0) + 1
        bars.append(Bar(f"{window.domain or 'window'} {seen[window.domain]}", (window.mean_kl,)))
    worst = max(windows, key=lambda each: each.max_kl)
    note = f"The largest KL of one position is {worst.max_kl:.3g} nats, in {worst.domain or 'the text'}."
    return Bars("Mean KL by window", "window", ("mean KL",), tuple(bars), "nats", note=note)
