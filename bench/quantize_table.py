"""The table of quantization methods: fidelity, time and memory of each row, ours and llm-compressor's.

Runs unattended: a row that fails is noted and the others go on. Results are appended to ``results.jsonl`` in ``--out``;
``--missing`` leaves out rows that already have one there, ``--print`` only shows the table of what is there.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantize.options import add_options, bench_of
from quantize.rows import ROWS, named
from quantize.run_rows import RESULTS, run_rows
from quantize.table import HEAD, latest, markdown_row, read_results


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", default=["all"], help=f"names, kinds, tools or all: {', '.join(ROWS)}")
    parser.add_argument("--missing", action="store_true", help="only rows without a result yet")
    parser.add_argument("--print", action="store_true", help="run nothing")
    add_options(parser)
    return parser.parse_args()


def results_so_far(file: Path) -> list[list[Mapping[str, Any]]]:
    return latest(read_results(file)) if file.is_file() else []


def main() -> None:
    args = parse_args()
    bench = bench_of(args)
    results = bench.out / RESULTS
    rows = [] if args.print else named(args.rows)
    if args.missing:
        done = {
            records[0]["row"]
            for records in results_so_far(results)
            if records[0]["model"] == bench.model.name and not any("error" in record for record in records)
        }
        rows = [row for row in rows if row.name not in done]
    if rows:
        for record in run_rows(bench, rows, args.rounds, not args.not_judged):
            print(markdown_row([record]), flush=True)
    print(f"\n{HEAD}")
    for records in results_so_far(results):
        print(markdown_row(records))


if __name__ == "__main__":
    main()
