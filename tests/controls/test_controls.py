"""The contract of every control in the table, on an artifact of every kind."""

from pathlib import Path

import pytest
import torch

from quantpipe.controls import CONTROLS
from quantpipe.controls.damaged_copy import write_damaged
from quantpipe.controls.tiny_model import KINDS
from quantpipe.errors import ArtifactError
from quantpipe.formats.artifact import Artifact, verify
from quantpipe.gate.metrics import METRICS

NOT_THERE = {
    "zero points off by one": "no zero points: symmetric",
    "KV scales of 1.0": "no KV scales: the KV cache is ",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_changes_something_that_is_stored_or_says_why_there_is_nothing(
    control: str, kind: str, tiny_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    artifact = Artifact.open(tiny_artifacts[kind])
    damage = CONTROLS[control](artifact)
    if isinstance(damage, str):
        assert damage.startswith(NOT_THERE[control])
        return
    assert damage.tensors or damage.files
    copy = write_damaged(artifact, damage, tmp_path / "copy")
    damaged = Artifact.open(copy)
    for name in damage.tensors:
        assert damaged.stored[name].spec == artifact.stored[name].spec
    linears = [name for name in damage.tensors if damaged.stored[name].spec.dtype != "I64" and "norm" not in name]
    assert not any(torch.equal(damaged.tensor(name), artifact.tensor(name)) for name in linears)
    for name in damage.files:
        assert (copy / name).read_bytes() != (artifact.folder / name).read_bytes()
    assert verify(copy) == []  # its manifest fits: digests would not tell
    assert verify(artifact.folder) == []
    untouched = artifact.stored.keys() - damage.tensors.keys()
    assert all(torch.equal(damaged.tensor(name), artifact.tensor(name)) for name in untouched)


def test_the_documentation_lists_every_control_and_figure() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "fidelity.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1].strip() for line in documented.splitlines() if line.startswith("| ")]
    assert [row for row in rows if row in CONTROLS] == list(CONTROLS)
    exact = {name for name, metric in METRICS.items() if metric.samples == "windows" and not name.endswith("_topk")}
    assert {row.strip("`") for row in rows} >= exact
    assert all(f"`{name}`" in documented for name in METRICS if name.endswith("_topk"))


def test_what_a_kind_has_is_damaged(tiny_artifacts: dict[str, Path]) -> None:
    def applies(control: str, kind: str) -> bool:
        return not isinstance(CONTROLS[control](Artifact.open(tiny_artifacts[kind])), str)

    assert [kind for kind in KINDS if applies("zero points off by one", kind)] == ["w4a16 g32 asymmetric"]
    assert [kind for kind in KINDS if applies("KV scales of 1.0", kind)] == ["w8a8, KV int8_static"]
    others = CONTROLS.keys() - NOT_THERE.keys()
    assert all(applies(control, kind) for control in others for kind in KINDS)


def test_a_folder_that_is_not_quantized_has_few_controls(tiny_base: Path, tmp_path: Path) -> None:
    found = {name: control(Artifact.open(tiny_base)) for name, control in CONTROLS.items()}
    assert {name for name, damage in found.items() if not isinstance(damage, str)} == {
        "one layer's weights are another's",
        "wrong chat template",
        "tokenizer cut short",
    }
    assert found["scales permuted in one layer"] == "no scales: nothing is quantized"
    damage = found["one layer's weights are another's"]
    assert not isinstance(damage, str)
    copy = write_damaged(Artifact.open(tiny_base), damage, tmp_path / "copy")
    with pytest.raises(ArtifactError, match="nothing to verify against"):
        verify(copy)


def test_zero_points_move_by_one_and_stay_within_the_bits(tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    from quantpipe.formats.layout import unpack

    artifact = Artifact.open(tiny_artifacts["w4a16 g32 asymmetric"])
    damage = CONTROLS["zero points off by one"](artifact)
    assert not isinstance(damage, str)
    name = "model.layers.0.self_attn.q_proj.weight_zero_point"
    before, after = (unpack(t.T.contiguous(), 4, 128).int() for t in (artifact.tensor(name), damage.tensors[name]))
    assert torch.equal(after, (before + 1).clamp_max(7))
    assert len(damage.tensors) == len(artifact.schemes)


def test_a_tokenizer_without_merges_loses_half_its_pieces(tmp_path: Path, tiny_base: Path) -> None:
    import json
    import shutil

    folder = Path(shutil.copytree(tiny_base, tmp_path / "copy"))
    for vocab, kept in (([["a", 0.0], ["b", -1.0]], [["a", 0.0]]), ({"a": 0, "b": 1}, {"a": 0})):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
        damage = CONTROLS["tokenizer cut short"](Artifact.open(folder))
        assert not isinstance(damage, str)
        assert json.loads(damage.files["tokenizer.json"])["model"]["vocab"] == kept
    (folder / "tokenizer.json").write_text("{}")
    assert CONTROLS["tokenizer cut short"](Artifact.open(folder)) == "no merges and no vocabulary to cut"
