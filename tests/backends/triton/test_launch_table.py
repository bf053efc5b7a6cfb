"""The launch table: every architecture and number of rows has an entry, and K is split only where that helps."""

import pytest
import torch

from quantpipe.backends.triton import launch_table
from quantpipe.backends.triton.launch_table import ARCHITECTURES, INT8, ONE_ROW, WEIGHT_ONLY


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((8, 0), 80),
        ((8, 6), 86),
        ((8, 7), 86),
        ((8, 9), 89),
        ((9, 0), 90),
        ((10, 0), 100),
        ((10, 3), 100),
        ((12, 0), 89),
    ],
)
def test_a_gpu_takes_the_entries_made_for_it_or_for_the_one_before(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert launch_table.architecture(torch.device("cuda")) == expected


@pytest.mark.parametrize("table", [INT8, WEIGHT_ONLY], ids=["int8", "weight_only"])
def test_entries_ascend_and_the_last_takes_any_number_of_rows(table: dict[int, launch_table.Entries]) -> None:
    assert tuple(table) == ARCHITECTURES == tuple(ONE_ROW)
    for entries in table.values():
        limits = [limit for limit, _ in entries]
        assert limits == sorted(set(limits))
        assert launch_table.entry_for(entries, 10**9) == entries[-1][1]
        for limit, launch in entries[:-1]:
            assert launch_table.entry_for(entries, limit) == launch
            assert launch.block_rows >= limit, "few rows are one tile, so that weights are read once"


def test_k_is_split_until_the_processors_have_work() -> None:
    assert launch_table.num_splits(80, 2, num_tiles=64, num_steps=32) == 3
    assert launch_table.num_splits(80, 1, num_tiles=1000, num_steps=32) == 1
    assert launch_table.num_splits(80, 2, num_tiles=1, num_steps=9) == 2
    assert launch_table.num_splits(80, 2, num_tiles=1, num_steps=3) == 1


def test_rows_longer_than_a_program_are_cut() -> None:
    assert launch_table.rows_launch(64, 4096) == launch_table.RowsLaunch(32, 64, 4)
    assert launch_table.rows_launch(11008, 4096) == launch_table.RowsLaunch(1, 4096, 8)
