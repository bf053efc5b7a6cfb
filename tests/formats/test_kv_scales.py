"""A sidecar that is missing, short or impossible is refused by the name of what is wrong with it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quantpipe.errors import ArtifactError
from quantpipe.formats.digests import KV_SCALES_NAME
from quantpipe.formats.kv_scales import KVScales, read_kv_scales

NUM_LAYERS, NUM_KV_HEADS = 2, 3


def whole() -> dict[str, Tensor]:
    key, value = (tuple(start + torch.rand(NUM_KV_HEADS) for _ in range(NUM_LAYERS)) for start in (0.1, 2.0))
    return KVScales(key, value).tensors()


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / KV_SCALES_NAME)


def read(folder: Path) -> KVScales:
    return read_kv_scales(folder, NUM_LAYERS, NUM_KV_HEADS)


def test_scales_read_back_as_they_were_written(tmp_path: Path) -> None:
    tensors = whole()
    write(tmp_path, tensors)
    found = read(tmp_path)
    assert torch.equal(found.key[1], tensors["model.layers.1.self_attn.k_scale"])
    assert torch.equal(found.value[0], tensors["model.layers.0.self_attn.v_scale"])


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        ("model.layers.1.self_attn.v_scale", None, r"model\.layers\.1\.self_attn\.v_scale is missing"),
        ("model.layers.0.self_attn.k_scale", [0.1, 0.0, 0.1], r"k_scale: scale 0\.0 of KV head 1 is not a positive"),
        ("model.layers.0.self_attn.k_scale", [0.1, 0.1, -1.0], r"scale -1\.0 of KV head 2"),
        ("model.layers.1.self_attn.v_scale", [torch.nan, 0.1, 0.1], r"1\.self_attn\.v_scale: scale nan of KV head 0"),
        ("model.layers.1.self_attn.v_scale", [0.1, torch.inf, 0.1], r"scale inf of KV head 1"),
        ("model.layers.1.self_attn.k_scale", [0.1, 0.1], r"k_scale is float32 \[2\]; float32 \[3\] is expected"),
        (
            "model.layers.2.self_attn.k_scale",
            [0.1] * 3,
            r"layers\.2\.self_attn\.k_scale belongs to none of .* 2 layers",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, scale: list[float] | None, message: str) -> None:
    tensors = whole()
    tensors.pop(name, None)
    if scale is not None:
        tensors[name] = torch.tensor(scale)
    write(tmp_path, tensors)
    with pytest.raises(ArtifactError, match=message) as caught:
        read(tmp_path)
    assert KV_SCALES_NAME in str(caught.value)


def test_file_that_is_missing_or_cut_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no such file; KV cache mode int8_static needs calibrated scales"):
        read(tmp_path)
    write(tmp_path, whole())
    path = tmp_path / KV_SCALES_NAME
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ArtifactError, match="not a readable safetensors file"):
        read(tmp_path)


def test_scales_in_another_dtype_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {name: scale.half() for name, scale in whole().items()})
    with pytest.raises(ArtifactError, match=r"is float16 \[3\]; float32 \[3\] is expected"):
        read(tmp_path)
