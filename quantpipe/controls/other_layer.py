"""One layer's weights in another's place: what a converter does that counts layers wrongly."""

from collections.abc import Mapping

from quantpipe.controls.control import Damage, tensors_by_layer
from quantpipe.formats.artifact import Artifact


def weights_of_another_layer(artifact: Artifact) -> Damage | str:
    """The middle layer gets the tensors of the nearest layer that stores as many as any in the same way."""
    layers = list(tensors_by_layer(artifact).values())
    if len(layers) < 2:
        return f"{len(layers)} layers: there is no other to take weights from"
    middle = len(layers) // 2
    others = sorted((n for n in range(len(layers)) if n != middle), key=lambda n: abs(n - middle))
    alike = max((_stored_alike(artifact, layers[middle], layers[n]) for n in others), key=len)
    if not any(name.endswith(("weight", "weight_packed")) for name in alike):
        return "no other layer is stored as the one in the middle"
    return Damage({ours: artifact.tensor(theirs) for ours, theirs in alike.items()})


def _stored_alike(artifact: Artifact, ours: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, str]:
    """Whole names in the one layer and in the other, of tensors with the same dtype and shape."""
    shared = [(ours[part], theirs[part]) for part in ours if part in theirs]
    return {a: b for a, b in shared if artifact.stored[a].spec == artifact.stored[b].spec}
