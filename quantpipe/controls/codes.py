"""Weight codes one too large: what comes of reading unsigned integers around another middle.

Shapes: N out_features, K in_features, W words of a row.
"""

from quantpipe.controls.control import Damage
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.layout import pack, unpack


def codes_off_by_one(artifact: Artifact) -> Damage | str:
    """Every integer of every linear plus one, where the bits allow it.

    All of them, as such a reader would: at 8 bits, one layer alone is moved by less than rounding moved the model.
    """
    tensors = {}
    for module, scheme in artifact.schemes.items():
        if scheme.is_packed:
            num_in = int(artifact.tensor(f"{module}.weight_shape")[1])
            q_NK = unpack(artifact.tensor(f"{module}.weight_packed"), scheme.bits, num_in)
            shifted_NK = q_NK.short().add_(1).clamp_max_(scheme.q_max)
            tensors[f"{module}.weight_packed"] = pack(shifted_NK, scheme.bits)
        else:
            q_NK = artifact.tensor(f"{module}.weight")
            tensors[f"{module}.weight"] = q_NK.short().add_(1).clamp_max_(scheme.q_max).to(q_NK.dtype)
    return Damage(tensors) if tensors else "no codes: nothing is quantized"
