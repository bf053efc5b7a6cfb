"""Quantization of equal method by quantpipe and by llm-compressor, in separate processes, taking turns: A B, B A, ...

Both read the same token ids; one judge, independent of both, holds both artifacts against the full-precision model.
Ratios (ours / theirs) come first: geometric mean over rounds for time and memory.
"""

import argparse
from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from quantize.options import add_options, bench_of
from quantize.rows import PAIRS, ROWS
from quantize.run_rows import run_rows
from quantize.table import HEAD, markdown_row


def ratios(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> str:
    """Ours / theirs: KL of the judged round, and wall seconds, processor seconds and peak memory over all rounds."""
    kl = ours[0]["mean_kl"] / theirs[0]["mean_kl"] if "mean_kl" in ours[0] and "mean_kl" in theirs[0] else None
    cost = {
        name: geometric_mean(a["cost"][name] / b["cost"][name] for a, b in zip(ours, theirs, strict=True))
        for name in ("wall_s", "cpu_s", "peak_gb")
    }
    shown = [*([] if kl is None else [f"mean KL {kl:.2f}"]), *(f"{name} {value:.2f}" for name, value in cost.items())]
    return ", ".join(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", choices=sorted(PAIRS), default=list(PAIRS))
    add_options(parser)
    args = parser.parse_args()
    bench = bench_of(args)
    for method in args.methods:
        pair = [ROWS[name] for name in PAIRS[method]]
        found: dict[str, list[Mapping[str, Any]]] = {row.name: [] for row in pair}
        for record in run_rows(bench, pair, args.rounds, not args.not_judged):
            found[record["row"]].append(record)
        print(f"\n{method}\n{HEAD}")
        for records in found.values():
            print(markdown_row(records))
        if any("error" in record for records in found.values() for record in records):
            continue
        ours, theirs = (sorted(found[row.name], key=lambda record: record["round"]) for row in pair)
        print(f"ours / theirs: {ratios(ours, theirs)}", flush=True)


if __name__ == "__main__":
    main()
