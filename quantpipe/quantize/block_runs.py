"""Running one decoder block on what it is called with: captured from the model once, then replayed block by block.

Shapes: S sequences, L tokens per sequence, D hidden size.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quantpipe.quantize.discover import DecoderBlocks

# Enough rows for a matrix product to run at full speed, few enough that a block's activations stay small.
TOKENS_PER_BATCH = 4096


@dataclass
class Batch:
    """Hidden states [S, L, D] of some sequences between two blocks, and what else a block is called with."""

    hidden_SLD: Tensor
    kwargs: dict[str, Any]

    def first_sequence(self, dtype: torch.dtype) -> "Batch":
        """One sequence of it, with floating tensors in ``dtype``: enough to see how a block is wired."""
        part = _first_sequence(self.kwargs, len(self.hidden_SLD))
        return Batch(self.hidden_SLD[:1].to(dtype), _cast_floats(part, dtype))


class StopForwardError(Exception):
    """Ends a forward pass once what was wanted has been seen."""


def capture_block_inputs(model: nn.Module, blocks: DecoderBlocks, token_ids_SL: npt.NDArray[np.int64]) -> list[Batch]:
    """Run the model up to its first block, a few sequences at a time, and keep what the block is called with."""
    captured: list[Batch] = []

    def capture(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.pop("hidden_states")
        captured.append(Batch(hidden.float(), _cast_floats(kwargs, torch.float32)))
        raise StopForwardError

    hook = blocks.blocks[0].register_forward_pre_hook(capture, with_kwargs=True)
    sequences_per_batch = max(1, TOKENS_PER_BATCH // token_ids_SL.shape[1])
    for start in range(0, len(token_ids_SL), sequences_per_batch):
        try:
            # Without use_cache=False a block run again would attend to the keys of its earlier runs.
            model(input_ids=torch.from_numpy(token_ids_SL[start : start + sequences_per_batch]), use_cache=False)
        except StopForwardError:
            continue
    hook.remove()
    return captured


def run_block(block: nn.Module, batch: Batch) -> Tensor:
    """The hidden states [S, L, D] that ``block`` gives out."""
    output = block(batch.hidden_SLD, **batch.kwargs)
    hidden_SLD: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden_SLD


def _cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors, also inside tuples and dicts, in ``dtype``; anything else unchanged."""
    if isinstance(value, dict):
        return {key: _cast_floats(part, dtype) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_cast_floats(part, dtype) for part in value)
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def _first_sequence(value: Any, num_sequences: int) -> Any:
    """The part of a block's keyword arguments that belongs to the first sequence of a batch."""
    if isinstance(value, dict):
        return {key: _first_sequence(part, num_sequences) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_first_sequence(part, num_sequences) for part in value)
    if isinstance(value, Tensor) and value.ndim > 0 and len(value) == num_sequences:
        return value[:1]
    return value
