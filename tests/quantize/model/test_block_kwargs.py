from pathlib import Path

import pytest
import torch

from quantpipe.quantize.model.block_kwargs import StoredKwargs, interned, map_leaves


def test_stored_arguments_come_back_as_they_were(tmp_path: Path) -> None:
    mask, cos = torch.rand(2, 1, 4, 4) > 0.5, torch.randn(2, 4, 8)
    blocks = [
        {"attention_mask": mask, "position_embeddings": (cos, cos.sin()), "cache": None, "scale": 0.5},
        {"attention_mask": None, "nested": {"positions": torch.arange(8).view(2, 4)}},
    ]
    stored = StoredKwargs.write(tmp_path / "kwargs.safetensors", blocks)
    assert len(stored) == 2
    first, second = stored[0:2]
    assert torch.equal(first["attention_mask"], mask)
    assert torch.equal(first["position_embeddings"][1], cos.sin())
    assert (first["cache"], first["scale"]) == (None, 0.5)
    assert second["attention_mask"] is None
    assert torch.equal(second["nested"]["positions"], torch.arange(8).view(2, 4))
    with pytest.raises(IndexError):
        stored[2]


def test_what_blocks_share_is_stored_once(tmp_path: Path) -> None:
    mask = torch.ones(1, 1, 64, 64)
    for name, num_blocks in (("one", 1), ("many", 20)):
        StoredKwargs.write(tmp_path / name, [{"attention_mask": mask.clone()} for _ in range(num_blocks)])
    assert (tmp_path / "many").stat().st_size == (tmp_path / "one").stat().st_size


def test_views_of_one_tensor_are_stored(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    blocks = [{"a": whole[:3], "b": whole[1:4], "c": whole.view(2, 3).T}]
    stored = StoredKwargs.write(tmp_path / "kwargs.safetensors", blocks)[0]
    assert all(torch.equal(stored[key], blocks[0][key]) for key in "abc")


def test_leaves_are_changed_at_any_depth() -> None:
    assert map_leaves({"a": (1, {"b": 2}), "c": 3}, lambda leaf: leaf + 1) == {"a": (2, {"b": 3}), "c": 4}


def test_tensors_are_shared_only_where_they_are_equal_in_every_respect() -> None:
    kept: list[torch.Tensor] = []
    first = interned(torch.ones(2, 2), kept)
    assert interned(torch.ones(2, 2), kept) is first
    assert interned(torch.ones(2, 2, dtype=torch.float64), kept) is not first
    assert interned(torch.ones(1).expand(2, 2), kept) is not first
    assert interned(None, kept) is None
    assert len(kept) == 3
