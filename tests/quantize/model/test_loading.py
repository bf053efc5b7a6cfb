import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from quantpipe.errors import ArtifactError, DataError
from quantpipe.quantize.model.loading import StreamedModel

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8]])


def copy_with(folder: Path, target: Path, tensors: dict[str, torch.Tensor], drop: tuple[str, ...] = ()) -> Path:
    """A copy of a model folder that stores other tensors."""
    shutil.copytree(folder, target)
    stored = {name: t for name, t in load_file(folder / "model.safetensors").items() if name not in drop}
    save_file(stored | tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def logits(module: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = module(input_ids=IDS, use_cache=False).logits
    return found


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_running_model_equals_the_one_that_transformers_loads(random_llama: Callable[..., Path], tied: bool) -> None:
    folder = random_llama(torch.bfloat16, tie_word_embeddings=tied)
    model = StreamedModel.open(folder)
    with model.running() as module:
        found = logits(module)
    assert torch.equal(found, logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)))
    assert (model.module.lm_head.weight is model.module.model.embed_tokens.weight) == tied  # type: ignore[union-attr]


def test_blocks_are_read_as_stored_and_nothing_of_them_is_kept(random_llama: Callable[..., Path]) -> None:
    folder = random_llama(torch.bfloat16)
    model = StreamedModel.open(folder)
    block = model.load_block(1)
    stored = load_file(folder / "model.safetensors")
    for name, parameter in block.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, stored[f"model.layers.1.{name}"])
    with model.running() as module:
        logits(module)
    assert all(parameter.is_meta for each in model.blocks.blocks for parameter in each.parameters())
    assert all("forward" not in vars(each) for each in model.blocks.blocks)
    assert not model.module.training


def test_a_block_is_rewritten_before_it_runs(random_llama: Callable[..., Path]) -> None:
    model = StreamedModel.open(random_llama())
    seen: list[int] = []

    def silence(index: int, block: nn.Module) -> None:
        seen.append(index)
        for name, parameter in block.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()

    with torch.no_grad(), model.running(silence) as module:
        found = logits(module)
        body = module.model  # type: ignore[union-attr]
        expected = module.lm_head(body.norm(body.embed_tokens(IDS)))  # type: ignore[operator,union-attr]
    assert seen == [0, 1]
    assert torch.equal(found, expected)


def test_opening_leaves_the_random_state(random_llama: Callable[..., Path]) -> None:
    folder = random_llama()
    state = torch.get_rng_state()
    StreamedModel.open(folder)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_nan_weight_is_named(random_llama: Callable[..., Path], tmp_path: Path, name: str) -> None:
    folder = random_llama()
    broken = load_file(folder / "model.safetensors")[name]
    broken[3, 4] = torch.nan
    with pytest.raises(DataError, match=rf"{name} holds NaN"):
        StreamedModel.open(copy_with(folder, tmp_path / "model", {name: broken})).load_block(1)


def test_missing_and_misshapen_tensors_are_named_on_opening(random_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder, name = random_llama(), "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ArtifactError, match=f"{name} is missing"):
        StreamedModel.open(copy_with(folder, tmp_path / "missing", {}, drop=(name,)))
    with pytest.raises(ArtifactError, match=rf"{name} has shape \[3, 64\], config\.json makes it \[128, 64\]"):
        StreamedModel.open(copy_with(folder, tmp_path / "shape", {name: torch.zeros(3, 64)}))
    with pytest.raises(ArtifactError, match=f"{name} is stored as I32"):
        StreamedModel.open(copy_with(folder, tmp_path / "dtype", {name: torch.zeros(128, 64, dtype=torch.int32)}))


def test_head_that_is_tied_and_stored_apart_is_not_tied(random_llama: Callable[..., Path], tmp_path: Path) -> None:
    """transformers does the same: the file counts, not the configuration."""
    folder = random_llama()
    head = load_file(folder / "model.safetensors")["model.embed_tokens.weight"] * 2
    model = StreamedModel.open(copy_with(folder, tmp_path / "model", {"lm_head.weight": head}))
    assert torch.equal(model.module.get_parameter("lm_head.weight"), head)


def test_folder_that_transformers_cannot_load_is_one_line(random_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(random_llama(), tmp_path / "model"))
    (folder / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ArtifactError, match="model_type 'no_such_model' is unknown to transformers") as caught:
        StreamedModel.open(folder)
    assert "\n" not in str(caught.value)
