import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantpipe.errors import ArtifactError, DataError
from quantpipe.quantize.loading import load_base_model


def test_stored_dtype_is_kept(random_llama: Callable[..., Path]) -> None:
    model = load_base_model(random_llama(torch.bfloat16))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not model.training


def test_nan_weight_is_named(random_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(random_llama(), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN"):
        load_base_model(folder)


def test_folder_that_transformers_cannot_load_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ArtifactError, match="cannot load this model") as caught:
        load_base_model(tmp_path)
    assert "\n" not in str(caught.value)
