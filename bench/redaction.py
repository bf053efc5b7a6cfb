"""How much the redaction rules find and what it costs: recall and precision on the labelled lines, and MB/s on texts.

Without ``--text`` the throughput is measured on the topics of Python's reference manual, one row per paragraph.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantpipe.calibration.redaction import RULE_NAMES, RULES, RULES_VERSION, Redactor, RedactSection
from quantpipe.calibration.redaction.scan import Scan

LABELLED = Path(__file__).resolve().parent.parent / "tests/calibration/redaction/labelled.jsonl"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--labelled", type=Path, default=LABELLED, help="lines with values: text, values")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="files whose lines are timed as rows")
    parser.add_argument("--repeats", type=int, default=5, help="the fastest of this many passes counts")
    parser.add_argument("--show", action="store_true", help="print what was missed and what was found wrongly")
    return parser.parse_args()


def tally(lines: Sequence[dict[str, Any]], show: bool) -> dict[str, Counter[str]]:
    """Per rule: values, values wholly covered by it, spans it found, and spans that touch a value of its kind."""
    redactor = Redactor(RedactSection(), b"bench")
    tallies = {name: Counter[str]() for name in RULE_NAMES}
    for number, line in enumerate(lines, start=1):
        text, values, found = line["text"], line["values"], redactor.find(line["text"])
        for value in values:
            covered = any(
                span.rule == value["rule"] and span.start <= value["start"] and span.end >= value["end"]
                for span in found
            )
            tallies[value["rule"]].update(values=1, covered=covered)
            if show and not covered:
                print(f"missed  {number:4} {value['rule']:16} {text[value['start'] : value['end']]!r}")
        for span in found:
            right = any(
                span.rule == value["rule"] and span.start < value["end"] and value["start"] < span.end
                for value in values
            )
            tallies[span.rule].update(found=1, right=right)
            if show and not right:
                print(f"wrongly {number:4} {span.rule:16} {text[span.start : span.end]!r}")
    return tallies


def rows_of(files: Sequence[Path]) -> list[tuple[str, list[str]]]:
    if files:
        return [(file.name, file.read_text(encoding="utf-8").split("\n")) for file in files]
    from pydoc_data.topics import topics

    return [("pydoc_data.topics", [part for topic in topics.values() for part in topic.split("\n\n")])]


def fastest_s(repeats: int, rows: Sequence[str], redactor: Redactor) -> float:
    times = []
    for _ in range(repeats):
        started = time.process_time()
        for row in rows:
            redactor.redact(row)
        times.append(time.process_time() - started)
    return min(times)


def main() -> None:
    args = parse_args()
    lines = [json.loads(line) for line in args.labelled.read_text(encoding="utf-8").splitlines()]
    num_negative = sum(not line["values"] for line in lines)
    print(f"rules version {RULES_VERSION}; {len(lines)} labelled lines, {num_negative} of them without a value\n")
    tallies = tally(lines, args.show)
    print("| rule | values | recall | spans | precision |\n|---|---:|---:|---:|---:|")
    for name, counts in tallies.items():
        recall, precision = counts["covered"] / counts["values"], counts["right"] / max(1, counts["found"])
        print(f"| {name} | {counts['values']} | {recall:.3f} | {counts['found']} | {precision:.3f} |")
    print("\n| text | rows | MB | found | MB/s | by rule alone, MB/s |\n|---|---:|---:|---|---:|---|")
    for name, rows in rows_of(args.text):
        num_bytes = sum(len(row.encode("utf-8", "surrogatepass")) for row in rows)
        redactor = Redactor(RedactSection(), b"bench")
        for row in rows:
            redactor.redact(row)
        found = ", ".join(f"{rule} {count}" for rule, count in redactor.counts.items()) or "nothing"
        speed = num_bytes / 1e6 / fastest_s(args.repeats, rows, redactor)
        alone = ", ".join(f"{rule} {num_bytes / 1e6 / rule_s(rule, rows):.0f}" for rule in RULE_NAMES)
        print(f"| {name} | {len(rows)} | {num_bytes / 1e6:.2f} | {found} | {speed:.1f} | {alone} |")


def rule_s(rule: str, rows: Sequence[str]) -> float:
    """Seconds of one rule over all rows, with the folding and the groups of digits that all rules share."""
    started = time.process_time()
    for row in rows:
        list(RULES[rule](Scan(row, ("CN", "US", "GB"))))  # type: ignore[index]
    return time.process_time() - started


if __name__ == "__main__":
    main()
