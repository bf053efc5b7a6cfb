"""How integer weights lie in GPU memory, and repacking them there. A private layout: it never reaches the disk.

K is cut into panels, and a panel of all N rows lies in one piece, so that any tile is read in whole cache lines. A row
of a panel is 16 words of 32 bits. A word holds 8 integers of up to 4 bits or 4 of up to 8 (so 3-bit weights take 4),
stored without sign as q + 8 or q + 128, the first in the lowest bits. Value v of word w is column 16 v + w of the
panel: one shift and one mask give the weights of 16 neighbouring columns where they are wanted, without an exchange
between threads.

Shapes: N out_features, K in_features, P panels, V values of a word, W words of a panel's row, G groups along K.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantpipe.errors import RecipeError
from quantpipe.formats.scheme import WeightScheme

# The smallest K of a tensor core's product of 16-bit numbers.
WORDS = 16
# Smaller groups would have more products in flight than the tensor memory of sm_100 holds.
GROUP_UNIT = 32


@dataclass(frozen=True)
class PackedWeights:
    """A weight as the kernels read it.

    ``scale_GN`` keeps its stored dtype. ``zero_GN`` (uint8) are the stored integers that stand for zero; None where
    that is the middle of the range. ``group_size`` is None where there is one scale per output feature.
    """

    panels_PNW: Tensor
    scale_GN: Tensor
    zero_GN: Tensor | None
    group_size: int | None
    values_per_word: int

    @property
    def out_features(self) -> int:
        return self.panels_PNW.shape[1]

    @property
    def panel_size(self) -> int:
        """Columns of a panel."""
        return self.values_per_word * WORDS

    def tensors(self) -> list[Tensor]:
        """What is held in memory."""
        return [self.panels_PNW, self.scale_GN, *([] if self.zero_GN is None else [self.zero_GN])]


def values_in_word(scheme: WeightScheme) -> int:
    """How many integers of a scheme a word of 32 bits holds."""
    return 8 if scheme.bits <= 4 else 4


def check_scheme(scheme: WeightScheme) -> None:
    """Raise RecipeError where no kernel takes the group size."""
    if scheme.group_size is not None and scheme.group_size % GROUP_UNIT:
        raise RecipeError(
            f"engine.backend: 'triton' has no kernel for {scheme.label} weights in groups of {scheme.group_size}; "
            f"quantize with a group size that {GROUP_UNIT} divides, or with one scale per channel"
        )


def pack_weights(q_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None, scheme: WeightScheme) -> PackedWeights:
    """Repack signed integers (int8), scales and zero points, on the device where they lie."""
    check_scheme(scheme)
    values_per_word = values_in_word(scheme)
    middle = 8 if scheme.bits <= 4 else 128
    # Columns that only fill the last panel are of no consequence: their activations are read as zero.
    stored_NK = (
        torch.nn.functional.pad(q_NK, (0, -q_NK.shape[1] % (values_per_word * WORDS))).view(torch.uint8) + middle
    )
    values_PNWV = stored_NK.view(len(q_NK), -1, values_per_word, WORDS).permute(1, 0, 3, 2)
    if scheme.bits <= 4:
        values_PNWV = values_PNWV[..., ::2] | (values_PNWV[..., 1::2] << 4)
    panels_PNW = values_PNWV.contiguous().view(torch.int32).squeeze(-1)
    zero_GN = None if zero_NG is None else (zero_NG.view(torch.uint8) + middle).T.contiguous()
    return PackedWeights(panels_PNW, scale_NG.T.contiguous(), zero_GN, scheme.group_size, values_per_word)
