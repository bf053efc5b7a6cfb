"""Every library's way to say that a disk takes no more, met for real: a device that is full, a limit on file sizes."""

import errno
import resource
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quantpipe.disk import GO_ON, disk_refusal, removing_empty, writing
from quantpipe.errors import DataError, RecipeError

LIMIT_BYTES = 4096
LARGE = torch.zeros(LIMIT_BYTES)
FULL = "no space left on the disk; free space"
GROWN = "the file may not grow larger here; raise the limit (ulimit -f) or take another disk"


def write_memmap(path: Path) -> None:
    np.memmap(path, dtype=np.uint8, mode="w+", shape=(4 * LIMIT_BYTES,))


def write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("large", bytes(4 * LIMIT_BYTES))


WRITERS: dict[str, Callable[[Path], object]] = {
    "safetensors": lambda path: save_file({"a": LARGE}, path),
    "torch": lambda path: torch.save(LARGE, path),
    "numpy": lambda path: np.save(path, LARGE.numpy()),
    "memmap": write_memmap,
    "zipfile": write_zip,
    "text": lambda path: path.write_text("a" * 4 * LIMIT_BYTES),
}


@pytest.fixture
def limited() -> Iterator[None]:
    """Within it, no file grows beyond LIMIT_BYTES; Python ignores the signal that goes with the error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.usefixtures("limited")
def test_a_file_that_may_not_grow_is_one_line_that_names_it(tmp_path: Path, writer: str) -> None:
    path = tmp_path / "large.npy"
    with pytest.raises(DataError) as refused, writing(path, GO_ON):
        WRITERS[writer](path)
    # torch and numpy keep nothing of the system's error
    expected = FULL if writer in ("torch", "numpy") else GROWN
    assert str(refused.value) == f"{path}: {expected} and run it again to go on from there"


@pytest.mark.parametrize("writer", ["torch", "text"])
def test_a_full_device_is_one_line_that_names_it(writer: str) -> None:
    path = Path("/dev/full")
    if not path.exists():
        pytest.skip("no /dev/full on this system")
    with pytest.raises(DataError) as refused, writing(path):
        WRITERS[writer](path)
    assert str(refused.value) == f"/dev/full: {FULL} and run it again"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), FULL),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk quota is used up; free space"),
        (RuntimeError("I/O error: Kein Speicherplatz (os error 28)"), FULL),
        (RuntimeError("I/O error: (os error 13)"), None),
        ("ERROR: Could not install: [Errno 28] No space left on device", FULL),
        (OSError(errno.ENOENT, "No such file or directory"), None),
        (RuntimeError("no space for the word"), None),
    ],
)
def test_what_is_full_is_told_by_number_and_by_text(error: BaseException | str, expected: str | None) -> None:
    assert disk_refusal(error) == expected


def test_new_folders_that_stay_empty_are_removed_and_others_left(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(RecipeError), removing_empty(tmp_path / "there" / "a" / "b"):
        (tmp_path / "there" / "a" / "b").mkdir(parents=True)
        raise RecipeError("no")
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]
    with removing_empty(tmp_path / "new" / "b"):
        (tmp_path / "new" / "b").mkdir(parents=True)
        (tmp_path / "new" / "kept").touch()
    assert sorted((tmp_path / "new").iterdir()) == [tmp_path / "new" / "kept"]


def test_an_error_that_led_to_another_is_looked_at_too() -> None:
    error = RuntimeError("a thread failed")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert disk_refusal(error) == FULL


@pytest.mark.parametrize("error", [ValueError("bad"), RecipeError("no space left"), KeyboardInterrupt()])
def test_other_errors_pass_as_they_are(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)) as found, writing(tmp_path):
        raise error
    assert found.value is error
