"""How much two CSV files overlap: near duplicates in the first, rows of it that are in the second, rows per second.

    python bench/overlap.py banking77_train.csv banking77_test.csv --field text

Prints counts and rows, never what a row says.
"""

import argparse
import csv
import time
from pathlib import Path

from quantpipe.calibration.checks.leakage import EvalText, LeakageIndex, LeakReport
from quantpipe.calibration.checks.near_duplicates import NearDuplicates
from quantpipe.calibration.text.language import detect


def read(file: Path, field: str) -> list[str]:
    with file.open(newline="", encoding="utf-8") as rows:
        return [row[field] for row in csv.DictReader(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("evaluation", type=Path)
    parser.add_argument("--field", default="text")
    parser.add_argument("--threshold", type=float, default=0.8)
    asked = parser.parse_args()
    rows, evaluated = read(asked.calibration, asked.field), read(asked.evaluation, asked.field)

    duplicates = NearDuplicates(asked.threshold)
    started_s = time.perf_counter()
    num_new = sum(duplicates.is_new(text) for text in rows)
    seconds = time.perf_counter() - started_s
    print(
        f"near duplicates: {len(rows) - num_new:,} of {len(rows):,} rows at {asked.threshold}; {_rate(rows, seconds)}"
    )

    started_s = time.perf_counter()
    texts = [EvalText(asked.evaluation.name, f"row {number}", text) for number, text in enumerate(evaluated, start=1)]
    index = LeakageIndex(texts)
    print(f"leakage index: {index.num_texts:,} texts; {_rate(evaluated, time.perf_counter() - started_s)}")

    report = LeakReport()
    started_s = time.perf_counter()
    for number, text in enumerate(rows, start=1):
        leak = index.find(text)
        if leak is not None:
            report.add(f"row {number}", leak)
    seconds = time.perf_counter() - started_s
    print(f"leakage: {_rate(rows, seconds)}")
    print("\n".join(report.lines(asked.calibration.name)) or "no row overlaps")

    detect(rows[0], ["en", "zh"])
    started_s = time.perf_counter()
    for text in rows:
        detect(text, ["en", "zh"])
    print(f"language: {_rate(rows, time.perf_counter() - started_s)}")


def _rate(rows: list[str], seconds: float) -> str:
    return f"{len(rows) / seconds:,.0f} rows/s of {sum(map(len, rows)) / len(rows):.0f} characters on average"


if __name__ == "__main__":
    main()
