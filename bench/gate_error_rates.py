"""How often the gate is wrong about lost accuracy: simulated suites, by size, margin, flips and clusters.

A false pass: the true loss is exactly the margin, the smallest that must not pass, and the verdict is PASS. A false
fail: as true, and the verdict is FAIL. Each is to stay near 5 % of suites. `right pass`: nothing is lost, and
the verdict is PASS; the rest stays UNSURE. Items of a cluster flip together with the chance `--shared`.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from quantpipe.evaluate.intervals import DEFAULT_CONFIDENCE, IntArray, design_effect, t_quantile, tango_interval
from quantpipe.gate.record import machine_facts
from quantpipe.gate.report import markdown_table

HEADINGS = ("items", "margin, points", "discordant", "items in a cluster", "false pass", "false fail", "right pass")


@dataclass(frozen=True)
class Case:
    """Suites of ``num_items`` in clusters of ``cluster_size``, ``discordance`` of which flip, judged at a margin."""

    num_items: int
    margin: float
    discordance: float
    cluster_size: int


def error_rates(case: Case, num_draws: int, shared: float, seed: int) -> tuple[float, float, float]:
    """Shares of drawn suites: PASS and FAIL where the margin is lost, PASS where nothing is."""
    rng = np.random.default_rng(seed)
    lost = verdicts(case, case.margin, num_draws, shared, rng)
    same = verdicts(case, 0.0, num_draws, shared, rng)
    return float(np.mean(lost > 0)), float(np.mean(lost < 0)), float(np.mean(same > 0))


def verdicts(case: Case, loss: float, num_draws: int, shared: float, rng: np.random.Generator) -> IntArray:
    """1 for PASS, -1 for FAIL, 0 for UNSURE, of suites whose true loss is ``loss``."""
    fracs = np.array([(case.discordance + loss) / 2, (case.discordance - loss) / 2, 1 - case.discordance])
    num_clusters = case.num_items // case.cluster_size
    cluster_of_N = np.repeat(np.arange(num_clusters), case.cluster_size)
    critical = t_quantile(DEFAULT_CONFIDENCE, num_clusters)
    known: dict[tuple[float, ...], int] = {}  # intervals by their counts: few differ
    found = []
    for _ in range(num_draws):
        loss_N = _draw(fracs, num_clusters, case.cluster_size, shared, rng)
        effect = round(design_effect(loss_N, cluster_of_N, pull=1.0), 6)
        key = (float((loss_N > 0).sum()), float((loss_N < 0).sum()), effect)
        if key not in known:
            low, high = tango_interval(key[0] / effect, key[1] / effect, len(loss_N) / effect, critical)
            known[key] = 1 if high <= case.margin else -1 if low > case.margin else 0
        found.append(known[key])
    return np.array(found)


def _draw(
    fracs: np.ndarray, num_clusters: int, cluster_size: int, shared: float, rng: np.random.Generator
) -> np.ndarray:
    """Each item lost (1), gained (-1) or neither; those of a cluster as its first with the chance ``shared``."""
    drawn_KS = rng.choice([1.0, -1.0, 0.0], p=fracs, size=(num_clusters, cluster_size))
    is_shared_KS = rng.random((num_clusters, cluster_size)) < shared
    return np.where(is_shared_KS, drawn_KS[:, :1], drawn_KS).ravel()


def cases(nums_items: Sequence[int], margins: Sequence[float], discordances: Sequence[float]) -> Iterator[Case]:
    """Those that can be: no more can be lost than flips."""
    for num_items in nums_items:
        for margin in margins:
            for discordance in discordances:
                if discordance >= margin / 100:
                    yield from (Case(num_items, margin / 100, discordance, size) for size in (1, 5))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", nargs="+", type=int, default=[50, 200, 1000])
    parser.add_argument("--margins", nargs="+", type=float, default=[1.0, 2.0, 5.0], help="points")
    parser.add_argument("--discordances", nargs="+", type=float, default=[0.02, 0.05, 0.15], help="shares that flip")
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--shared", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = []
    for case in cases(options.items, options.margins, options.discordances):
        rates = error_rates(case, options.draws, options.shared, options.seed)
        shown = [f"{100 * rate:.1f} %" for rate in rates]
        size = str(case.cluster_size)
        rows.append((f"{case.num_items:,}", f"{100 * case.margin:g}", f"{100 * case.discordance:g} %", size, *shown))
    print(f"{datetime.now(UTC):%Y-%m-%d}, {machine_facts()['cpu']}, {options.draws:,} draws\n")
    print(markdown_table(HEADINGS, rows, right=set(range(len(HEADINGS)))))


if __name__ == "__main__":
    main()
