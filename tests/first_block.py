"""One decoder block of a stored model with what it is called with, as transforms are given it."""

import copy
from pathlib import Path

import numpy as np
import torch
from torch import nn

from quantpipe.formats.scheme import WeightScheme, w4a16
from quantpipe.quantize.model.block_runs import QUANTIZED, HiddenStates, StoredBatches, capture_block_inputs
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.transforms.transform import TransformInput


def given_block(
    folder: Path,
    work: Path,
    scheme: WeightScheme | None = None,
    index: int = 0,
    shape: tuple[int, int] = (4, 32),
    dtype: torch.dtype = torch.float32,
) -> TransformInput:
    """Block ``index`` of the model in ``folder``, fed with random tokens; all of its linears are targets."""
    model = StreamedModel.open(folder)
    work.mkdir(exist_ok=True)
    hidden = HiddenStates(work)
    token_ids = np.random.default_rng(0).integers(3, 128, shape)
    kwargs = capture_block_inputs(model, token_ids, hidden, (QUANTIZED,))
    original = model.load_block(index)
    block = copy.deepcopy(original).to(dtype)
    linears = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    schemes = dict.fromkeys(linears, scheme or w4a16(32))
    return TransformInput(block, original, linears, StoredBatches(hidden, kwargs, index), schemes)
