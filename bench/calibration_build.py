"""Rows per second and peak memory of ``quantpipe calibrate build`` on synthetic rows, each build in a child process.

Rows are invented tickets of 5 to 60 words: a share repeats an earlier one word for word, a share holds an e-mail
address, a card number or a phone number, and customers have several tickets each. Memory that is flat in the number
of rows shows as equal peaks; the smallest build is the cost of starting (libraries and the tokenizer).
"""

import argparse
import csv
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quantize.child import Cost, run_child

from quantpipe.gate.record import machine_facts, utc_now

WORDS_IN_VOCABULARY = 20_000
REPEATED_FRAC = 0.02
PERSONAL_FRAC = 0.05
TICKETS_PER_CUSTOMER = 5
SET = """\
version: 1
name: bench
languages: [en, de]
stratify: [length]
sources:
  - path: {file}
    fields: {{prompt: question, response: answer}}
    template: none
    group: customer
    language: {language}
"""
MAIN = "from quantpipe.cli import main; main()"
HEADINGS = ("date", "machine", "rows", "MB", "wall, s", "rows/s", "CPU, s", "peak, MB")


def tickets(num_rows: int, seed: int) -> Iterator[dict[str, str]]:
    """Invented rows; the same numbers give the same rows."""
    source = random.Random(seed)
    letters = "aaabcdeeeefghiiiklmnnooprrsstttuvwz"
    vocabulary = ["".join(source.choices(letters, k=source.randint(2, 10))) for _ in range(WORDS_IN_VOCABULARY)]
    earlier: list[tuple[str, str]] = []
    for number in range(num_rows):
        if earlier and source.random() < REPEATED_FRAC:
            question, answer = source.choice(earlier)
        else:
            question, answer = (" ".join(source.choices(vocabulary, k=source.randint(5, 60))) for _ in range(2))
            if source.random() < PERSONAL_FRAC:
                question += source.choice(
                    (f" mail me at user{number}@example.com", " card 4111 1111 1111 1111", " call +1 202-555-0143")
                )
            if len(earlier) < 1000:
                earlier.append((question, answer))
        customer = f"c{source.randrange(max(1, num_rows // TICKETS_PER_CUSTOMER))}"
        yield {"id": str(number), "customer": customer, "question": question, "answer": answer}


def write_rows(path: Path, num_rows: int, seed: int) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = tickets(num_rows, seed)
        if path.suffix == ".csv":
            writer = csv.DictWriter(file, ("id", "customer", "question", "answer"))
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def build(folder: Path, num_rows: int, args: argparse.Namespace) -> tuple[Cost, float]:
    """Write the rows, build a set from them in a child, and return its cost and the file's megabytes."""
    folder.mkdir()
    path = folder / f"tickets.{args.format}"
    write_rows(path, num_rows, args.seed)
    (folder / "set.yaml").write_text(SET.format(file=path.name, language=args.language), encoding="utf-8")
    command = [sys.executable, "-c", MAIN, "calibrate", "build", str(folder), "--model", str(args.model)]
    command += ["--num-sequences", str(args.num_sequences), "--sequence-length", str(args.sequence_length)]
    command += ["--out", str(folder / "built")]
    cost = run_child(command, folder / "log.txt", {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    size_mb = path.stat().st_size / 1e6
    path.unlink()
    return cost, size_mb


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with the tokenizer")
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--format", choices=("csv", "jsonl"), default="csv")
    parser.add_argument("--language", default="en", help="a code, or auto: detected for the rows that are tokenized")
    parser.add_argument("--num-sequences", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scratch", type=Path, help="where rows are written; default: the system's temporary folder")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    machine = machine_facts()
    where = f"{utc_now()[:10]} | {machine['cpu']} ({machine['simd']}), {machine['cores']} cores"
    print(f"| {' | '.join(HEADINGS)} |")
    print("|---|---|" + "---:|" * (len(HEADINGS) - 2))
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        for num_rows in args.rows:
            cost, size_mb = build(Path(scratch) / str(num_rows), num_rows, args)
            cells = f"{num_rows:,} | {size_mb:.0f} | {cost.wall_s:.1f} | {num_rows / cost.wall_s:,.0f}"
            print(f"| {where} | {cells} | {cost.cpu_s:.1f} | {1000 * cost.peak_gb:.0f} |", flush=True)


if __name__ == "__main__":
    main()
