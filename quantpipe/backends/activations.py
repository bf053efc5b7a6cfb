"""The functions that gate an MLP, by the name a description gives them."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quantpipe.models.description import Activation

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}
