"""The kernels' cases once more under NVIDIA's compute-sanitizer, which sees accesses out of bounds and races."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quantpipe.doctor.parts import AbsentError
from quantpipe.doctor.record import Row

TOOLS = ("memcheck", "racecheck")
TIMEOUT_S = 45.0
# Where CUDA's toolkit is when it is not on the path.
_USUAL = Path("/usr/local/cuda/bin/compute-sanitizer")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
_FINDING = re.compile(r"^=+ +(?:Invalid|Error|Race reported|Uninitialized|Misaligned)", re.MULTILINE)


def sanitizer_rows() -> Iterator[Row]:
    """A row for each tool. AbsentError where compute-sanitizer is not present."""
    program = shutil.which("compute-sanitizer") or (str(_USUAL) if _USUAL.is_file() else None)
    if program is None:
        raise AbsentError("compute-sanitizer is not present; it comes with NVIDIA's CUDA toolkit")
    for tool in TOOLS:
        yield sanitizer_row(program, tool)


def sanitizer_row(program: str, tool: str, timeout_s: float = TIMEOUT_S) -> Row:
    """What one tool says of the part ``kernels`` in a process of its own, of as much as it gets through in time."""
    with tempfile.TemporaryDirectory() as folder:
        output, said = Path(folder) / "check.json", Path(folder) / "said"
        own = (sys.executable, "-m", "quantpipe.doctor", "--gpu-check", "--only", "kernels", "--output", str(output))
        with said.open("wb") as log:
            process = subprocess.Popen(
                [program, "--tool", tool, *own], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # what it watches would go on without it
                process.wait()
                code = None
        return {"tool": tool} | _reading(said.read_text(encoding="utf-8", errors="replace"), code, timeout_s)


def _reading(text: str, code: int | None, timeout_s: float) -> Row:
    summary, num_found = _SUMMARY.search(text), len(_FINDING.findall(text))
    if summary is not None:
        return {"found": f"{summary[1]} errors", "ok": int(summary[1]) == 0}
    ending = f"not finished within {timeout_s:.0f} s" if code is None else f"no summary; it ended with {code}"
    return {"found": f"{ending}, {num_found} errors until then", "ok": False if num_found else None}
