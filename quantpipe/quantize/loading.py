"""The base model as a transformers module, ready to be run block by block. Loads from disk only, never from a hub."""

from pathlib import Path

import torch
from torch import nn

from quantpipe.errors import ArtifactError, DataError


def load_base_model(folder: Path, trust_remote_code: bool = False) -> nn.Module:
    """The model in the dtype it is stored in, on the CPU, in evaluation mode.

    Raises ArtifactError where transformers cannot load it, DataError where a weight is NaN or infinite.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            attn_implementation="sdpa",
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ArtifactError(f"{folder}: transformers cannot load this model: {_first_line(error)}") from error
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise DataError(f"{folder}: weight {name} holds NaN or infinite values; fix or re-download the base model")
    return model.eval()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
