"""The kernels under the address and undefined-behaviour sanitizers: tests of attention and of whole steps once more.

Takes minutes, so it is run on request only, by CI once:

    make test-sanitized
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quantpipe.backends.cpu.native.build import BuildError, compile_library, find_compiler, library_name, wanted_isas
from quantpipe.cache import cache_folder

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-O1")
RUNTIMES = ("libasan.so", "libubsan.so")
TESTS = Path(__file__).parent
CHOSEN = "every_head_size or pieces or overflowed or held_before or without_tokens or logits_equal or codes_and or most"


def runtimes() -> list[str]:
    """The sanitizers' own libraries, which have to be loaded before all else."""
    compiler = find_compiler()
    found = [
        subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in RUNTIMES
    ]
    missing = [name for name, path in zip(RUNTIMES, found, strict=True) if not Path(path).is_absolute()]
    if missing:
        pytest.skip(f"{compiler} has no {missing[0]}")
    return found


@pytest.mark.slow
@pytest.mark.skipif("QUANTPIPE_TEST_SANITIZERS" not in os.environ, reason="QUANTPIPE_TEST_SANITIZERS is not set")
def test_kernels_stay_within_their_memory() -> None:
    try:
        preloaded = runtimes()
        name = library_name(wanted_isas())
        folder = cache_folder() / "native-sanitized"
        library = folder / "native" / name
        if not library.is_file():
            shutil.rmtree(folder, ignore_errors=True)
            compile_library(library, FLAGS, wanted_isas())
    except BuildError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-p",
            "no:cacheprovider",
            "-k",
            f"({CHOSEN}) and not emulated",
            *(str(TESTS / f"test_{part}.py") for part in ("attention", "step_kernels", "forward")),
        ],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "QUANTPIPE_CACHE": str(folder),
            "LD_PRELOAD": " ".join(preloaded),
            # What Python itself never frees is not of interest.
            "ASAN_OPTIONS": "detect_leaks=0",
        },
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert [path.name for path in library.parent.iterdir()] == [name], "another library than this one was tested"
