"""Chooses how weights under floating-point activations run on this machine."""

import torch

from quantpipe.backends.cpu.expanded import ExpandedLinear
from quantpipe.backends.cpu.int4 import make_int4_linear
from quantpipe.backends.cpu.kernel_check import CpuLinear
from quantpipe.backends.cpu.scratch import Scratch
from quantpipe.models.weights import LinearWeights


def make_weight_only_linear(weights: LinearWeights, scratch: Scratch) -> tuple[CpuLinear, str]:
    """The fastest right way to run them, and what the user should know about it."""
    assert weights.scheme is not None, "weights in floating point need no expanding"
    if weights.scheme.bits == 4:
        return make_int4_linear(weights, scratch)
    linear = ExpandedLinear(weights, scratch, torch.float32, rounds=False)
    note = f"{weights.scheme.name}: no kernel for {weights.scheme.bits}-bit weights here; they are expanded to float32"
    return linear, f"{note} for each product, exact but slower"
