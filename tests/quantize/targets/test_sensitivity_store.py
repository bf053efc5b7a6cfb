from pathlib import Path

import pytest
import torch

from quantpipe.formats.scheme import w4a16, weight_only
from quantpipe.quantize.targets.allocate import LinearSet
from quantpipe.quantize.targets.sensitivity_store import remembered

SETS = [
    LinearSet({"q": (64, 128), "k": (32, 128)}, w4a16(64), torch.bfloat16, 0.1 + 0.2),
    LinearSet({"lm_head": (1000, 128)}, weight_only(8, None, symmetric=False), torch.float32, 1e-17),
]


def refuse() -> list[LinearSet]:
    raise AssertionError("measured again")


def test_what_was_measured_is_read_back_to_the_last_bit(tmp_path: Path) -> None:
    assert remembered(tmp_path, lambda: SETS) == SETS
    assert remembered(tmp_path, refuse) == SETS


def test_an_interrupted_measurement_leaves_nothing_to_go_on_with(tmp_path: Path) -> None:
    def interrupted() -> list[LinearSet]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        remembered(tmp_path, interrupted)
    assert list(tmp_path.iterdir()) == []
    assert remembered(tmp_path, lambda: SETS) == SETS
