"""Make the artifacts of some rows, judge them, and append what was found to ``results.jsonl``. Holds no tensors.

Everything of one model goes to one folder: token ids, the base model's logits, artifacts, logs, results. A row that
fails is recorded with its error and the others go on.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantize.child import ChildError, run_child
from quantize.rows import OURS, Machine, Row, Tokens

HERE = Path(__file__).parent
RESULTS = "results.jsonl"


@dataclass(frozen=True)
class Bench:
    """What all rows share: the model, the texts, where results go, and the two interpreters."""

    model: Path
    calibration_text: Path
    test_text: Path
    out: Path
    tokens: Tokens
    machine: Machine
    peer_python: Path | None = None
    peer_batch_size: int = 1
    keep_artifacts: bool = False

    @property
    def environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(self.machine.threads), "TOKENIZERS_PARALLELISM": "false"}

    def python(self, script: str, log: str, *arguments: str | Path, peer: Path | None = None) -> dict[str, float]:
        """Run one of the scripts beside this file, in the peer's environment or our own; returns what it cost."""
        command = [str(peer or sys.executable), str(HERE / script), *map(str, arguments)]
        return asdict(run_child(command, self.out / log, self.environment, self.machine.nice))


def prepare(bench: Bench) -> tuple[Path, Path]:
    """The files of calibration and test windows; made once per size."""
    bench.out.mkdir(parents=True, exist_ok=True)
    tokens = bench.tokens
    files: list[Path] = []
    wanted = (
        ("calibration", bench.calibration_text, tokens.num_windows),
        ("test", bench.test_text, tokens.num_test_windows),
    )
    for name, text, num_windows in wanted:
        file = bench.out / f"{name}-{num_windows}x{tokens.window_tokens}.npy"
        if not file.is_file():
            sizes = ("--num-windows", str(num_windows), "--window-tokens", str(tokens.window_tokens))
            bench.python("cut_windows.py", f"{name}.log", "--model", bench.model, "--text", text, *sizes, "--out", file)
        files.append(file)
    return files[0], files[1]


def run_rows(bench: Bench, rows: Sequence[Row], rounds: int = 1, is_judged: bool = True) -> Iterator[Mapping[str, Any]]:
    """Yield the record of each row of each round, as it is appended to the results.

    Rows take turns: A B A B, with the order reversed every other round. Artifacts are judged in the first round.
    """
    calibration, test = prepare(bench)
    for number in range(rounds):
        for row in rows if number % 2 == 0 else list(reversed(rows)):
            record: dict[str, Any] = {
                "row": row.name,
                "tool": row.tool,
                "kind": row.kind,
                "model": bench.model.name,
                "round": number,
                "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
                "tokens": asdict(bench.tokens),
                "threads": bench.machine.threads,
                "nice": bench.machine.nice,
                "load_before": round(os.getloadavg()[0], 2),
            }
            try:
                record |= _run_row(bench, row, calibration, test, is_judged and number == 0)
            except ChildError as error:
                record["error"] = str(error)
            with (bench.out / RESULTS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            yield record


def _run_row(bench: Bench, row: Row, calibration: Path, test: Path, is_judged: bool) -> dict[str, Any]:
    artifact = bench.out / row.name
    shutil.rmtree(artifact, ignore_errors=True)
    found: dict[str, Any] = {"cost": _make(bench, row, calibration, artifact)}
    phases = _phases_file(bench, row)
    found["phases"] = json.loads(phases.read_text(encoding="utf-8"))
    weights = sum(path.stat().st_size for path in artifact.glob("*.safetensors"))
    found["weights_mb"] = round(weights / 1e6, 1)
    if is_judged:
        found |= _judge(bench, row, test, artifact)
    if not bench.keep_artifacts:
        shutil.rmtree(artifact, ignore_errors=True)
    return found


def _phases_file(bench: Bench, row: Row) -> Path:
    return bench.out / f"{row.name}.phases.json"


def _make(bench: Bench, row: Row, calibration: Path, artifact: Path) -> dict[str, float]:
    where: list[str | Path] = ["--model", bench.model, "--windows", calibration, "--artifact", artifact]
    where += ["--phases", _phases_file(bench, row), "--threads", str(bench.machine.threads)]
    log = f"{row.name}.log"
    if row.tool == OURS:
        what = ["--kv-dtype", row.kv_dtype] if row.section is None else ["--section", json.dumps(row.section)]
        return bench.python("make_ours.py", log, *where, *what)
    if bench.peer_python is None:
        raise ChildError("no --peer-python: the interpreter of llm-compressor's environment")
    where += ["--method", row.method, "--bits", str(row.bits), "--dtype", row.dtype]
    where += ["--batch-size", str(bench.peer_batch_size)]
    return bench.python("make_llmcompressor.py", log, *where, peer=bench.peer_python)


def _judge(bench: Bench, row: Row, test: Path, artifact: Path) -> dict[str, Any]:
    figures = bench.out / f"{row.name}.figures.json"
    arguments: list[str | Path] = ["--base", bench.model, "--windows", test, "--artifact", artifact, "--out", figures]
    arguments += ["--base-logits", test.with_suffix(".base-logits.npy"), "--threads", str(bench.machine.threads)]
    if row.kv_dtype:
        arguments += ["--kv-dtype", row.kv_dtype]
    bench.python("judge.py", f"{row.name}.judge.log", *arguments)
    found: dict[str, Any] = json.loads(figures.read_text(encoding="utf-8"))
    return found
