"""Scales in another order: what a writer does that sorts channels and forgets to sort their scales."""

import torch

from quantpipe.controls.control import Damage, middle_linears
from quantpipe.formats.artifact import Artifact

SEED = 0


def scales_permuted(artifact: Artifact) -> Damage | str:
    """The scales of the middle layer's linears, each row at another row's place."""
    names = [f"{module}.weight_scale" for module in middle_linears(artifact)]
    if not names:
        return "no scales: nothing is quantized"
    generator = torch.Generator().manual_seed(SEED)
    tensors = {name: artifact.tensor(name) for name in names}
    return Damage({name: t[torch.randperm(len(t), generator=generator)] for name, t in tensors.items()})
