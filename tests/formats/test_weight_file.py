"""Headers of safetensors files: read as the library itself reads them, and refused where it would refuse them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quantpipe.errors import ArtifactError
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.weight_file import read_header

TENSORS = {
    "a": torch.arange(6, dtype=torch.int16).reshape(2, 3),
    "b": torch.tensor(1.5, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 4),
    "flags": torch.tensor([True, False]),
    "small": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def rewrite(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the header, whatever becomes of its length."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    encoded = json.dumps(header).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[end:])


def test_every_dtype_and_shape_is_read_as_it_was_written(file: Path) -> None:
    (file.parent / "config.json").write_text("{}")
    artifact = Artifact.open(file.parent)
    for name, tensor in TENSORS.items():
        found = artifact.tensor(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))


def test_pieces_are_the_bytes_in_order(file: Path) -> None:
    place = read_header(file)["a"]
    pieces = b"".join(bytes(piece) for piece in place.chunks(memoryview(bytearray(5))))
    assert pieces == TENSORS["a"].numpy().tobytes()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda header: header["a"].update(shape=[2, 4]), "takes 12 bytes"),
        (lambda header: header["a"].update(data_offsets=[4, 16]), "does not begin where"),
        (lambda header: header.pop("flags"), "does not begin where|end at byte"),
        (lambda header: header["a"].pop("dtype"), "dtype"),
        (lambda header: header.update(more=3), "not subscriptable"),
    ],
)
def test_header_that_does_not_fit_its_file_is_refused_in_one_line(
    file: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    rewrite(file, change)
    with pytest.raises(ArtifactError, match=f"not a readable safetensors file: .*({reason})") as caught:
        read_header(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x05", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]", b"\x02\0\0\0\0\0\0\0{]"])
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(ArtifactError, match="not a readable safetensors file"):
        read_header(tmp_path / "other")
