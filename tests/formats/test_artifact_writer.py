import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quantpipe.formats.artifact_writer as writer
from quantpipe.errors import DataError
from quantpipe.formats.artifact import Artifact, verify
from quantpipe.formats.artifact_writer import QuantWeight, quantization_config, write_artifact
from quantpipe.formats.layout import absmax_scale, encode
from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8, weight_only


def round_all(base: Artifact, scheme: WeightScheme) -> dict[str, QuantWeight]:
    weights = {}
    for name in sorted(base.tensor_names()):
        if name.endswith("_proj.weight"):
            weight_NK = base.tensor(name)
            scale_NG = absmax_scale(weight_NK, scheme, weight_NK.dtype)
            weights[name.removesuffix(".weight")] = QuantWeight(encode(weight_NK, scale_NG, scheme), scale_NG, scheme)
    return weights


def write(folder: Path, target: Path, scheme: WeightScheme = w4a16(32), **options: int) -> Artifact:  # noqa: B008
    base = Artifact.open(folder)
    weights = round_all(base, scheme)
    return write_artifact(
        target,
        base,
        weights,
        quantization_config(dict.fromkeys(weights, scheme), ["lm_head"]),
        {"kv_cache": "auto"},
        **options,
    )


@pytest.mark.parametrize("scheme", [w4a16(32), w8a8()], ids=str)
def test_written_artifact_is_clean_and_declares_its_scheme(
    random_llama: Callable[..., Path], tmp_path: Path, scheme: WeightScheme
) -> None:
    artifact = write(random_llama(torch.bfloat16), tmp_path / "artifact", scheme)
    assert verify(artifact.folder) == []
    assert artifact.scheme_of("model.layers.0.mlp.up_proj") == scheme
    assert artifact.scheme_of("model.embed_tokens") is None


def test_same_inputs_give_the_same_bytes(random_llama: Callable[..., Path], tmp_path: Path) -> None:
    base = random_llama(torch.bfloat16)
    first, second = (write(base, tmp_path / name) for name in ("a", "b"))
    for path in sorted(first.folder.iterdir()):
        assert path.read_bytes() == (second.folder / path.name).read_bytes(), path.name


def test_shards_hold_the_same_tensors_and_an_exact_total(random_llama: Callable[..., Path], tmp_path: Path) -> None:
    base = random_llama()
    whole = load_file(write(base, tmp_path / "whole").folder / "model.safetensors")
    sharded = write(base, tmp_path / "sharded", max_shard_bytes=20_000)
    index = json.loads((sharded.folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert all(torch.equal(sharded.tensor(name), tensor) for name, tensor in whole.items())
    assert verify(sharded.folder) == []


def test_full_disk_leaves_the_old_artifact_and_no_partial_folder(
    random_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = random_llama()
    before = write(base, tmp_path / "artifact").digest

    def fill_up(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "save_file", fill_up)
    with pytest.raises(
        DataError, match="artifact: no space left on the disk; free space and run it again to go on from there"
    ):
        write(base, tmp_path / "artifact", w8a8())
    assert Artifact.open(tmp_path / "artifact").digest == before
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]


@pytest.mark.parametrize("kind", ["a file", "a link"])
@pytest.mark.parametrize("points_at", ["folder", "file", "nothing"])
def test_a_file_or_link_in_the_artifacts_place_is_refused_and_kept(
    random_llama: Callable[..., Path], tmp_path: Path, kind: str, points_at: str
) -> None:
    target, other = tmp_path / "artifact", tmp_path / "other"
    if kind == "a file":
        target.write_text("mine")
    else:
        if points_at == "folder":
            write(random_llama(), other)
        elif points_at == "file":
            other.write_text("mine")
        target.symlink_to(other)
    with pytest.raises(DataError) as refused:
        write(random_llama(), target)
    assert str(refused.value) == (f"{target}: is {kind}, no artifact of quantpipe; move it, or choose another `output`")
    assert target.is_symlink() if kind == "a link" else target.read_text() == "mine"
    assert not list(tmp_path.glob(".partial-*"))


def test_interrupt_leaves_nothing_and_the_next_run_starts_cleanly(
    random_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = random_llama()

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(writer, "save_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write(base, tmp_path / "artifact")
    assert list(tmp_path.iterdir()) == []
    assert verify(write(base, tmp_path / "artifact").folder) == []


def test_partial_folder_of_a_killed_run_is_removed(random_llama: Callable[..., Path], tmp_path: Path) -> None:
    stale = tmp_path / ".partial-artifact-killed"
    stale.mkdir()
    write(random_llama(), tmp_path / "artifact")
    assert not stale.exists()


def test_unwritable_output_is_one_line(random_llama: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot be written"):
        write(random_llama(), tmp_path / "file" / "artifact")


def test_code_and_pickles_do_not_travel(random_llama: Callable[..., Path], tmp_path: Path) -> None:
    base = Path(shutil.copytree(random_llama(), tmp_path / "base"))
    (base / "modeling_custom.py").write_text("raise SystemExit")
    (base / "pytorch_model.bin").write_bytes(b"pickle")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    names = {path.name for path in write(base, tmp_path / "artifact").folder.iterdir()}
    assert "chat_template.jinja" in names
    assert "generation_config.json" in names
    assert not names & {"modeling_custom.py", "pytorch_model.bin"}


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.0.no_norm.weight", torch.ones(64), "stores none of that name"),
        ("model.norm.weight", torch.ones(64, dtype=torch.float16), r"into F16 \[64\], but the base model stores F32"),
        ("model.norm.weight", torch.ones(32), r"into F32 \[32\], but the base model stores F32 \[64\]"),
    ],
    ids=["name", "dtype", "shape"],
)
def test_changed_tensor_that_does_not_fit_the_base_is_refused(
    random_llama: Callable[..., Path], tmp_path: Path, name: str, tensor: torch.Tensor, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        write_artifact(tmp_path / "artifact", Artifact.open(random_llama()), {}, None, {}, tensors={name: tensor})
    assert not (tmp_path / "artifact").exists()


def test_commonest_scheme_is_declared_for_every_linear_and_others_by_name() -> None:
    schemes = {"a.0": weight_only(8, None), "a.1": w4a16(32), "a.2": w4a16(32), "a.3": weight_only(8, None, False)}
    declared = quantization_config(schemes, ["lm_head"])
    assert [group["targets"] for group in declared["config_groups"].values()] == [["Linear"], ["a.0"], ["a.3"]]
    assert declared["config_groups"]["group_0"]["weights"]["num_bits"] == 4
    assert declared["format"] == "pack-quantized"
    assert quantization_config({**schemes, "a.4": w8a8()}, [])["format"] == "mixed-precision"


def test_schemes_that_are_equally_common_are_declared_in_the_model_s_order() -> None:
    for first, second in ((w4a16(32), w8a8()), (w8a8(), w4a16(32))):
        declared = quantization_config({"a": first, "b": second}, [])
        assert declared["config_groups"]["group_0"]["format"] == first.format


def test_experts_are_declared_by_the_pattern_that_readers_stack_them_by() -> None:
    names = ["mlp.experts.0.w1", "mlp.experts.1.w1"]
    schemes = {"q": w4a16(32), "k": w4a16(32), "v": w4a16(32), **dict.fromkeys(names, weight_only(8, None))}
    groups = quantization_config(schemes, [])["config_groups"]
    assert groups["group_1"]["targets"] == ["re:.*[.]experts[.].*"]


def test_sidecar_is_written_and_watched_but_is_none_of_the_model_s_tensors(
    random_llama: Callable[..., Path], tmp_path: Path
) -> None:
    base = Artifact.open(random_llama())
    sidecars = {"kv_scales.safetensors": {"scale": torch.ones(2)}}
    artifact = write_artifact(tmp_path / "artifact", base, {}, None, {}, sidecars=sidecars)
    assert verify(artifact.folder) == []
    assert artifact.tensor_names() == base.tensor_names()
    (artifact.folder / "kv_scales.safetensors").unlink()
    assert verify(artifact.folder) == ["file kv_scales.safetensors is missing; the manifest lists it"]
