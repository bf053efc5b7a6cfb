"""How integer weights lie in GPU memory, and repacking them there. A private layout: it never reaches the disk.

K is cut into panels of 64 or 32 columns that never straddle two groups. A panel of all N rows lies in one piece, so that
any tile is read in whole cache lines. Integers are stored without sign, q + 2^(bits-1): up to 4 bits as nibbles of int32
words, the first in the lowest, else as bytes. So 3-bit weights take 4 bits here.

Shapes: N out_features, K in_features, P panels, W words or bytes of a panel's row, C columns of a panel, G groups along K.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantpipe.errors import QuantpipeError
from quantpipe.formats.scheme import WeightScheme

PANEL_SIZES = (64, 32)
# Nibbles hold q + 8, bytes q + 128, whatever the bits of the scheme.
MAX_NIBBLE_BITS, NIBBLE_MIDDLE, BYTE_MIDDLE = 4, 8, 128


@dataclass(frozen=True)
class PackedWeights:
    """A weight as the kernels read it.

    ``panels_PNW`` is int32 (nibbles) or uint8. ``scale_GN`` keeps its stored dtype. ``zero_GN`` (uint8) are the stored
    integers that stand for zero; None where that is the middle of the range.
    """

    panels_PNW: Tensor
    scale_GN: Tensor
    zero_GN: Tensor | None
    panels_per_group: int

    @property
    def panel_size(self) -> int:
        return self.panels_PNW.shape[2] * (8 if self.has_words else 1)

    @property
    def has_words(self) -> bool:
        return self.panels_PNW.dtype == torch.int32

    @property
    def has_groups(self) -> bool:
        """Whether scales differ along K."""
        return self.scale_GN.shape[0] > 1

    @property
    def out_features(self) -> int:
        return self.panels_PNW.shape[1]

    def tensors(self) -> list[Tensor]:
        """What is held in memory."""
        return [self.panels_PNW, self.scale_GN, *([] if self.zero_GN is None else [self.zero_GN])]


def panel_size(scheme: WeightScheme, in_features: int) -> int:
    """Columns of a panel. QuantpipeError where no kernel takes the group size."""
    unit = in_features if scheme.group_size is None else scheme.group_size
    sizes = [size for size in PANEL_SIZES if unit % size == 0]
    if scheme.group_size is not None and not sizes:
        raise QuantpipeError(
            f"triton backend: {scheme.label} weights: no kernel takes groups of {scheme.group_size}; "
            f"quantize with a group size that {PANEL_SIZES[-1]} divides, or with one scale per channel"
        )
    return sizes[0] if sizes else PANEL_SIZES[-1]


def pack_weights(q_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None, scheme: WeightScheme) -> PackedWeights:
    """Repack signed integers (int8), scales and zero points, on the device where they lie."""
    num_out, num_in = q_NK.shape
    size = panel_size(scheme, num_in)
    has_words = scheme.bits <= MAX_NIBBLE_BITS
    middle = NIBBLE_MIDDLE if has_words else BYTE_MIDDLE
    # Columns that only fill the last panel are zero; their activations are read as zero besides.
    stored_NK = torch.nn.functional.pad(q_NK, (0, -num_in % size)).view(torch.uint8) + middle
    panels_PNC = stored_NK.view(num_out, -1, size).transpose(0, 1)
    if has_words:
        panels = (panels_PNC[..., ::2] | (panels_PNC[..., 1::2] << 4)).contiguous().view(torch.int32)
    else:
        panels = panels_PNC.contiguous()
    zero_GN = None if zero_NG is None else (zero_NG.view(torch.uint8) + middle).T.contiguous()
    num_groups = scheme.num_groups(num_in)
    return PackedWeights(panels, scale_NG.T.contiguous(), zero_GN, len(panels) // num_groups)
