"""KV scales that were never calibrated: 1.0, as a reader takes them that does not find any."""

import torch
from safetensors.torch import load_file, save

from quantpipe.controls.control import Damage
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.digests import KV_SCALES_NAME
from quantpipe.formats.kv_mode import kv_mode


def kv_scales_of_one(artifact: Artifact) -> Damage | str:
    """Every scale of the KV cache becomes 1."""
    if not kv_mode(artifact.kv_cache, "kv_cache").needs_scales:
        return f"no KV scales: the KV cache is {artifact.kv_cache}"
    scales = load_file(artifact.folder / KV_SCALES_NAME)
    return Damage(files={KV_SCALES_NAME: save({name: torch.ones_like(scale) for name, scale in scales.items()})})
