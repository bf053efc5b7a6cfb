"""The kernels' cases once more under NVIDIA's compute-sanitizer, which sees accesses out of bounds and races."""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quantpipe.doctor.parts import AbsentError
from quantpipe.doctor.record import Row

TOOLS = ("memcheck", "racecheck")
TIMEOUT_S = 30
# Where CUDA's toolkit is when it is not on the path.
_USUAL = Path("/usr/local/cuda/bin/compute-sanitizer")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def sanitizer_rows() -> Iterator[Row]:
    """A row for each tool. AbsentError where compute-sanitizer is not present."""
    program = shutil.which("compute-sanitizer") or (str(_USUAL) if _USUAL.is_file() else None)
    if program is None:
        raise AbsentError("compute-sanitizer is not present; it comes with NVIDIA's CUDA toolkit")
    for tool in TOOLS:
        yield sanitizer_row(program, tool)


def sanitizer_row(program: str, tool: str) -> Row:
    """What one tool says of the part ``kernels`` in a process of its own; nothing where its time was too short."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "check.json"
        own = (sys.executable, "-m", "quantpipe.doctor", "--gpu-check", "--only", "kernels", "--output", str(output))
        try:
            done = subprocess.run(
                [program, "--tool", tool, *own], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return {"tool": tool, "found": f"not finished within {TIMEOUT_S} s", "ok": None}
    return {"tool": tool} | _reading(done.stdout + done.stderr, done.returncode)


def _reading(text: str, code: int) -> Row:
    found = _SUMMARY.search(text)
    if found is None:
        return {"found": f"no summary; it ended with {code}", "ok": None}
    num_errors = int(found[1])
    return {"found": f"{num_errors} errors", "ok": num_errors == 0}
