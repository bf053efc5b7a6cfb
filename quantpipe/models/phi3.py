"""The Phi-3 family, Phi-3, Phi-3.5 mini and Phi-4 mini: Llama whose query, key and value rows lie in one tensor, gate
and up rows in another; a rope that may turn part of a head; an optional sliding window."""

from typing import Any

from quantpipe.formats.artifact import Artifact
from quantpipe.models.config_fields import optional_int
from quantpipe.models.decoder import DecoderForm, activation_of, default_head_dim, describe_decoder, every_layer
from quantpipe.models.description import DecoderDescription
from quantpipe.models.rope_fields import RopeReader, rope_parameters
from quantpipe.models.windows import same_window

# What transformers assumes where a config.json leaves these out.
DEFAULT_NORM_EPS = 1e-5
DEFAULT_ORIGINAL_POSITIONS = 4096
# What early checkpoints of this family call longrope.
LONGROPE_NAMES = ("su", "yarn")


def describe_phi3(artifact: Artifact, rope: RopeReader) -> DecoderDescription:
    """The decoder that config.json declares. ArtifactError where a field asks for what this runtime does not do."""
    head_dim = default_head_dim(artifact)
    own_rope = rope(artifact, _rope_parameters(artifact), head_dim, may_be_partial=True)
    form = DecoderForm(
        head_dim=head_dim,
        ropes=every_layer(artifact, own_rope),
        windows=same_window(artifact, optional_int(artifact, "sliding_window", None)),
        activation=activation_of(artifact),
        norm_eps=DEFAULT_NORM_EPS,
        is_fused=True,
    )
    return describe_decoder(artifact, form)


def _rope_parameters(artifact: Artifact) -> dict[str, Any]:
    """Older names of longrope are read as such; the original context stands beside the rope, not in it."""
    config, key = artifact.config, "original_max_position_embeddings"
    found = {**rope_parameters(config), key: config.get(key, DEFAULT_ORIGINAL_POSITIONS)}
    is_renamed = found.get("rope_type", found.get("type")) in LONGROPE_NAMES
    return {**found, "rope_type": "longrope"} if is_renamed else found
