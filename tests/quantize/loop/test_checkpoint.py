import resource
from pathlib import Path

import pytest
import torch

from quantpipe.errors import DataError
from quantpipe.formats.artifact_writer import QuantWeight
from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8, weight_only
from quantpipe.quantize.kv_int8 import KVLayerRecord
from quantpipe.quantize.loop.checkpoint import PartResult, WorkFolder, block_part, discard_work
from quantpipe.quantize.loop.records import LayerRecord
from quantpipe.quantize.transforms.transform import TransformRecord

ASYMMETRIC = weight_only(4, 32, symmetric=False)


def result(scheme: WeightScheme, seed: int = 0) -> PartResult:
    generator = torch.Generator().manual_seed(seed)
    q_NK = torch.randint(scheme.q_min, scheme.q_max + 1, (4, 64), generator=generator, dtype=torch.int8)
    scale_NG = torch.rand(4, scheme.num_groups(64), generator=generator).to(torch.bfloat16)
    zero_NG = None if scheme.symmetric else torch.randint(-8, 8, scale_NG.shape, generator=generator, dtype=torch.int8)
    name = f"layers.{seed}.up"
    return PartResult(
        weights={name: QuantWeight(q_NK, scale_NG, scheme, zero_NG)},
        tensors={f"layers.{seed}.norm.weight": torch.rand(8, generator=generator)},
        layers=[LayerRecord(name, scheme.label, 0.1, 1 / 3, 0.01, 2, 64, 1.5)],
        transformed=[TransformRecord((name,), None, None, "no pair", 0.5, None, "3 of 4 heads")],
        kv=[KVLayerRecord(seed, 64, {"int8_static": 1e-3}, (1.0, 2.5), (0.25, 1 / 3))],
    )


@pytest.mark.parametrize("scheme", [w4a16(32), w8a8(), ASYMMETRIC], ids=lambda scheme: scheme.label)
def test_a_part_is_read_back_as_it_was(tmp_path: Path, scheme: WeightScheme) -> None:
    work, given = WorkFolder.open(tmp_path, "a"), result(scheme)
    work.write("block-00000", given)
    found = work.read(["block-00000"])
    (name, expected), weight = next(iter(given.weights.items())), found.weights["layers.0.up"]
    assert list(found.weights) == [name]
    assert weight.scheme == expected.scheme
    assert torch.equal(weight.q_NK, expected.q_NK)
    assert torch.equal(weight.scale_NG, expected.scale_NG)
    assert (weight.zero_NG is None) == scheme.symmetric
    if weight.zero_NG is not None and expected.zero_NG is not None:
        assert torch.equal(weight.zero_NG, expected.zero_NG)
    assert torch.equal(found.tensors["layers.0.norm.weight"], given.tensors["layers.0.norm.weight"])
    assert (list(found.layers), list(found.transformed), list(found.kv)) == (given.layers, given.transformed, given.kv)


def test_a_disk_that_is_full_is_refused_by_the_file_and_leaves_no_finished_block(tmp_path: Path) -> None:
    work = WorkFolder.open(tmp_path, "a")
    hidden = work.hidden(0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        with pytest.raises(DataError) as of_block:
            work.write(block_part(0), result(w8a8()))
        with pytest.raises(DataError) as of_hidden:
            hidden.write(3, {"quantized": torch.rand(1, 8, 16)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for refused, file in ((of_block, "block-00000.safetensors"), (of_hidden, "hidden-00000/batch-00003.safetensors")):
        assert str(refused.value).startswith(f"{work.folder / file}: the file may not grow larger here; ")
        assert str(refused.value).endswith(" and run it again to go on from there")
    assert work.num_finished_blocks() == 0


def test_parts_are_joined_in_their_order(tmp_path: Path) -> None:
    work = WorkFolder.open(tmp_path, "a")
    for index in range(3):
        work.finish_block(index, result(w4a16(32), index))
    found = WorkFolder.open(tmp_path, "a").read([block_part(index) for index in range(3)])
    assert list(found.weights) == [layer.name for layer in found.layers] == [f"layers.{i}.up" for i in range(3)]
    assert len(found.tensors) == 3
    with pytest.raises(KeyError):
        found.weights["layers.3.up"]


def test_block_counts_as_finished_only_with_all_before_it_and_its_record(tmp_path: Path) -> None:
    work = WorkFolder.open(tmp_path, "a")
    for index in (0, 1, 3):
        work.write(block_part(index), result(w4a16(32), index))
    assert work.num_finished_blocks() == 2
    (work.folder / "block-00001.json").unlink()  # killed between the tensors and the record
    assert work.num_finished_blocks() == 1


def test_hidden_states_of_other_blocks_are_removed_on_resuming(tmp_path: Path) -> None:
    """Killed after block 0 was finished and while block 1 was writing: what enters block 1 is kept, the rest is not."""
    work = WorkFolder.open(tmp_path, "a")
    hidden_SLD = torch.rand(1, 2, 4)
    for index in range(3):
        work.hidden(index).write(0, {"quantized": hidden_SLD})
    work.write(block_part(0), result(w4a16(32)))
    assert work.num_finished_blocks() == 1
    assert sorted(path.name for path in work.folder.glob("hidden-*")) == ["hidden-00001"]
    assert torch.equal(work.hidden(1).read(0), hidden_SLD)


def test_finishing_a_block_removes_what_entered_it(tmp_path: Path) -> None:
    work = WorkFolder.open(tmp_path, "a")
    for index in range(2):
        work.hidden(index).write(0, {"quantized": torch.rand(1, 2, 4)})
    work.finish_block(0, result(w4a16(32)))
    assert sorted(path.name for path in work.folder.glob("hidden-*")) == ["hidden-00001"]


def test_only_folders_of_other_runs_are_removed(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("kept")
    WorkFolder.open(tmp_path, "stale").write("block-00000", result(w4a16(32)))
    WorkFolder.open(tmp_path, "a").write("block-00000", result(w4a16(32)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "notes"]
    assert WorkFolder.open(tmp_path, "a").num_finished_blocks() == 1
    discard_work(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_the_same_result_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        WorkFolder.open(tmp_path / name, "work").write("block-00000", result(ASYMMETRIC))
    for suffix in ("json", "safetensors"):
        first, second = ((tmp_path / name / "work" / f"block-00000.{suffix}").read_bytes() for name in "ab")
        assert first == second
