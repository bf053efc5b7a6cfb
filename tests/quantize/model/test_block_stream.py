from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from quantpipe.quantize.model.block_stream import BlockStream
from quantpipe.quantize.model.loading import StreamedModel

TOKEN_IDS = np.random.default_rng(0).integers(3, 128, (10, 16))


@pytest.fixture(autouse=True)
def _batches_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantpipe.quantize.model.block_runs.TOKENS_PER_BATCH", 64)


@pytest.mark.parametrize("positions", [None, np.tile(np.arange(8), (10, 2))], ids=["whole", "apart"])
def test_sequences_leave_the_last_block_as_the_running_model_has_them(
    tiny_model: Callable[..., Path], tmp_path: Path, positions: np.ndarray | None
) -> None:
    model = StreamedModel.open(tiny_model("llama"))
    stream = BlockStream.enter(model, tmp_path / "stream", TOKEN_IDS, positions)
    outputs: list[torch.Tensor] = []
    for index in range(2):
        block = model.work_copy(model.load_block(index))
        if index == 1:
            block.register_forward_hook(lambda _module, _args, output: outputs.append(output))
        stream.run(block, index, index == 1, (3, 10), lambda: None)
    expected: list[torch.Tensor] = []
    model.module.get_submodule("model.norm").register_forward_pre_hook(lambda _module, args: expected.append(args[0]))
    given = {} if positions is None else {"position_ids": torch.from_numpy(positions)}
    with torch.no_grad(), model.running():
        model.module(input_ids=torch.from_numpy(TOKEN_IDS), use_cache=False, **given)
    assert [len(output) for output in outputs] == [3, 1, 4, 2]
    assert torch.allclose(torch.cat(outputs), expected[0], rtol=1e-4, atol=1e-5)


def test_the_end_of_each_part_is_told_once_all_its_sequences_are_through(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = StreamedModel.open(tiny_model("llama"))
    stream = BlockStream.enter(model, tmp_path / "stream", TOKEN_IDS)
    block = model.work_copy(model.load_block(0))
    through, told = [0], []
    block.register_forward_hook(lambda _module, _args, output: through.append(through[-1] + len(output)))
    stream.run(block, 0, False, (1, 2, 5, 8, 10), lambda: told.append(through[-1]))
    assert stream.num_sequences == 10
    assert told == [1, 2, 5, 8, 10]


def test_only_what_enters_the_next_block_is_kept(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = StreamedModel.open(tiny_model("llama"))
    stream = BlockStream.enter(model, tmp_path, TOKEN_IDS)
    for index, left in ((0, ["hidden-00001"]), (1, ["hidden-00002"])):
        stream.run(model.work_copy(model.load_block(index)), index, index == 1, (), lambda: None)
        assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert list((tmp_path / "hidden-00002").iterdir()) == []
