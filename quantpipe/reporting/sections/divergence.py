"""How far the candidate's distributions are from the baseline's: over all the text, and window by window."""

from collections.abc import Sequence
from dataclasses import dataclass

from quantpipe.reporting.exhibits import Bar, Bars, Exhibit, Facts
from quantpipe.reporting.report import ReportSection


@dataclass(frozen=True)
class WindowKL:
    """A window of held-out text: where it is from, and the mean and the largest KL over its positions, in nats."""

    domain: str
    mean_kl: float
    max_kl: float


def divergence_section(facts: Sequence[tuple[str, str]], windows: Sequence[WindowKL] = ()) -> ReportSection:
    """The divergence; where none was measured it has no exhibits."""
    exhibits: list[Exhibit] = [Facts(tuple(facts))] if facts else []
    if windows:
        exhibits.append(_by_window(windows))
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
