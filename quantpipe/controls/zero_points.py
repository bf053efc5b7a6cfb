"""Zero points one too large: what comes of a file that stores them less one, read as one that does not.

Shapes: N out_features, G groups.
"""

import torch

from quantpipe.controls.control import Damage
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.layout import pack, unpack
from quantpipe.formats.scheme import WeightScheme


def zero_points_off_by_one(artifact: Artifact) -> Damage | str:
    """Every zero point of every linear that has them, plus one where the bits allow it."""
    schemes = {name: scheme for name, scheme in artifact.schemes.items() if not scheme.symmetric}
    if not schemes:
        return "no zero points: symmetric" if artifact.schemes else "no zero points: nothing is quantized"
    names = {f"{module}.weight_zero_point": (module, scheme) for module, scheme in schemes.items()}
    return Damage({name: _shifted(artifact, name, *found) for name, found in names.items()})


def _shifted(artifact: Artifact, name: str, module: str, scheme: WeightScheme) -> torch.Tensor:
    num_out = artifact.stored[f"{module}.weight_scale"].spec.shape[0]
    zero_GN = unpack(artifact.tensor(name).T.contiguous(), scheme.bits, num_out)  # packed along the output features
    return pack((zero_GN + 1).clamp_max(scheme.q_max), scheme.bits).T.contiguous()
