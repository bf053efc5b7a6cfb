"""The Mistral family: Llama without biases, whose layers may all look back over one sliding window."""

from quantpipe.formats.artifact import Artifact
from quantpipe.models.config_fields import optional_int
from quantpipe.models.decoder import DecoderForm, activation_of, default_head_dim, describe_decoder, every_layer
from quantpipe.models.description import DecoderDescription
from quantpipe.models.rope_fields import RopeReader, rope_parameters
from quantpipe.models.windows import same_window

DEFAULT_WINDOW = 4096  # where a config.json leaves it out


def describe_mistral(artifact: Artifact, rope: RopeReader) -> DecoderDescription:
    """The decoder that config.json declares. ArtifactError where a field asks for what this runtime does not do."""
    head_dim = default_head_dim(artifact)
    form = DecoderForm(
        head_dim=head_dim,
        ropes=every_layer(artifact, rope(artifact, rope_parameters(artifact.config), head_dim)),
        windows=same_window(artifact, optional_int(artifact, "sliding_window", DEFAULT_WINDOW)),
        activation=activation_of(artifact),
    )
    return describe_decoder(artifact, form)
