import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from quantpipe.errors import RecipeError
from quantpipe.quantize.model.block_kwargs import BlockKwargs
from quantpipe.quantize.model.block_runs import (
    QUANTIZED,
    Batch,
    HiddenStates,
    Positions,
    StoredBatches,
    capture_block_inputs,
    run_block,
)
from quantpipe.quantize.model.loading import StreamedModel

FAMILIES = ("llama", "gemma3", "opt", "gpt_neox", "gpt2", "qwen3_moe")


@pytest.fixture
def token_ids(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Batches of 4, 4 and 2 sequences."""
    monkeypatch.setattr("quantpipe.quantize.model.block_runs.TOKENS_PER_BATCH", 64)
    return np.random.default_rng(0).integers(3, 128, (10, 16))


def captured(folder: Path, work_folder: Path, token_ids: np.ndarray) -> tuple[StreamedModel, HiddenStates, BlockKwargs]:
    model, hidden = StreamedModel.open(folder), HiddenStates(work_folder)
    return model, hidden, capture_block_inputs(model, token_ids, hidden, [QUANTIZED])


@pytest.mark.parametrize("name", FAMILIES)
def test_replayed_blocks_give_what_the_running_model_does(
    tiny_model: Callable[..., Path], tmp_path: Path, token_ids: np.ndarray, name: str
) -> None:
    model, hidden, kwargs = captured(tiny_model(name), tmp_path, token_ids)
    outputs = [batch.hidden_SLD for batch in StoredBatches(hidden, kwargs, 0)]
    given: list[torch.Tensor] = []
    with torch.no_grad():
        for index in range(len(model.blocks.blocks)):
            block = model.load_block(index).float()
            outputs = [run_block(block, Batch(x, kwargs.of(number, index))) for number, x in enumerate(outputs)]
        head = model.module.get_output_embeddings()  # type: ignore[operator]
        hook = head.register_forward_pre_hook(lambda _module, args: given.append(args[0]))
        with model.replaced([_handing_on(index, outputs) for index in range(2)]):
            model.module(input_ids=torch.from_numpy(token_ids), use_cache=False)
        with model.running():
            model.module(input_ids=torch.from_numpy(token_ids), use_cache=False)
        hook.remove()
    # the sums of one large batch are made in another order
    assert torch.allclose(given[0], given[1], rtol=1e-4, atol=1e-5)


def _handing_on(index: int, outputs: list[torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda hidden_states, *_args, **_kwargs: torch.cat(outputs) if index else hidden_states


def test_one_copy_is_kept_of_what_blocks_share(
    tiny_model: Callable[..., Path], tmp_path: Path, token_ids: np.ndarray
) -> None:
    _, _, kwargs = captured(tiny_model("llama"), tmp_path, token_ids)
    first, second = (kwargs.of(0, block)["position_embeddings"][0] for block in (0, 1))
    assert first is second
    assert kwargs.of(0, 0) is kwargs.of(1, 0)
    assert kwargs.of(2, 0) is not kwargs.of(1, 0)


def test_each_type_of_block_has_its_own_rope(
    tiny_model: Callable[..., Path], tmp_path: Path, token_ids: np.ndarray
) -> None:
    _, _, kwargs = captured(tiny_model("gemma3"), tmp_path, token_ids)
    first, second = (kwargs.of(0, block)["position_embeddings"][0] for block in (0, 1))
    assert not torch.equal(first, second)


def test_capturing_again_without_a_folder_gives_the_same_arguments(
    tiny_model: Callable[..., Path], tmp_path: Path, token_ids: np.ndarray
) -> None:
    model, _, kwargs = captured(tiny_model("llama"), tmp_path, token_ids)
    again = capture_block_inputs(model, token_ids, None, [])
    assert again.sequences_of_batch == kwargs.sequences_of_batch == [4, 4, 2]
    cos = kwargs.of(2, 1)["position_embeddings"][0]
    assert torch.equal(again.of(2, 1)["position_embeddings"][0], cos)


def test_batches_are_a_sequence(tiny_model: Callable[..., Path], tmp_path: Path, token_ids: np.ndarray) -> None:
    _, hidden, kwargs = captured(tiny_model("llama"), tmp_path, token_ids)
    batches = StoredBatches(hidden, kwargs, 0)
    assert batches.num_tokens() == [64, 64, 32]
    assert [len(batch.hidden_SLD) for batch in batches] == [4, 4, 2]
    assert torch.equal(batches[-1].hidden_SLD, batches[2].hidden_SLD)
    assert [len(batch.hidden_SLD) for batch in batches[1:]] == [4, 2]
    with pytest.raises(IndexError):
        batches[3]


def test_a_sequence_alone_keeps_what_all_share() -> None:
    hidden_SLD, mask, positions = torch.randn(3, 3, 2), torch.arange(27).reshape(3, 1, 3, 3), torch.arange(3)
    batch = Batch(hidden_SLD, {"mask": mask, "positions": positions, "rope": (torch.randn(1, 3, 2),)})
    one = batch.sequence(1, torch.float64)
    assert one.hidden_SLD.dtype == one.kwargs["rope"][0].dtype == torch.float64
    assert torch.equal(one.hidden_SLD.float(), hidden_SLD[1:2])
    assert torch.equal(one.kwargs["mask"], mask[1:2])
    assert torch.equal(one.kwargs["positions"], positions)


def test_model_that_changes_hidden_states_between_blocks_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, token_ids: np.ndarray
) -> None:
    model = StreamedModel.open(tiny_model("llama"))
    block = model.blocks.blocks[1]
    block.register_forward_pre_hook(lambda _module, args: (args[0] * 2, *args[1:]))
    with pytest.raises(RecipeError, match=r"does more between its decoder blocks .*seen at model\.layers\.1"):
        capture_block_inputs(model, token_ids, HiddenStates(tmp_path), [QUANTIZED])


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox", "qwen3_moe"])
def test_a_document_packed_apart_comes_out_as_it_does_alone(
    tiny_model: Callable[..., Path], tmp_path: Path, token_ids: np.ndarray, name: str
) -> None:
    """In every sequence of every batch, through both blocks; documents begin at other places in each sequence."""
    model, hidden, starts = StreamedModel.open(tiny_model(name)), HiddenStates(tmp_path / "hidden"), range(3, 13)
    hidden.folder.mkdir()
    position_ids = np.stack([np.concatenate([np.arange(start), np.arange(16 - start)]) for start in starts])
    kwargs = capture_block_inputs(model, token_ids, hidden, [QUANTIZED], Positions(position_ids, tmp_path))
    with torch.no_grad():
        packed = _through_blocks(model, hidden, kwargs)
        for row, start in enumerate(starts):
            for number, part in enumerate((slice(0, start), slice(start, 16))):
                alone = HiddenStates(tmp_path / f"alone-{row}-{number}")
                alone.folder.mkdir()
                kwargs_alone = capture_block_inputs(model, token_ids[row : row + 1, part], alone, [QUANTIZED])
                expected = _through_blocks(model, alone, kwargs_alone)[0]
                assert torch.allclose(packed[row, part], expected, rtol=1e-4, atol=1e-5), (row, number)


def _through_blocks(model: StreamedModel, hidden: HiddenStates, kwargs: BlockKwargs) -> torch.Tensor:
    outputs = [batch.hidden_SLD for batch in StoredBatches(hidden, kwargs, 0)]
    for index in range(len(model.blocks.blocks)):
        block = model.load_block(index).float()
        outputs = [run_block(block, Batch(x, kwargs.of(number, index))) for number, x in enumerate(outputs)]
    return torch.cat(outputs)


def test_arguments_of_documents_packed_apart_are_written_anew_when_resuming(
    tiny_model: Callable[..., Path], tmp_path: Path, token_ids: np.ndarray
) -> None:
    model = StreamedModel.open(tiny_model("llama"))
    positions = Positions(np.tile(np.arange(8), (10, 2)), tmp_path)
    first = copy.deepcopy(capture_block_inputs(model, token_ids, None, [], positions).of(2, 1))
    for path in tmp_path.iterdir():
        path.write_bytes(b"what a killed run left half written")
    again = capture_block_inputs(model, token_ids, None, [], positions).of(2, 1)
    assert first.keys() == again.keys()
    assert torch.equal(first["attention_mask"], again["attention_mask"])
    assert first["attention_mask"].shape == (2, 1, 16, 16)
