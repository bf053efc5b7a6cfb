"""The Qwen3 family, dense models: Qwen2 with norms of queries and keys per head in place of biases."""

from quantpipe.formats.artifact import Artifact
from quantpipe.models.config_fields import optional_int
from quantpipe.models.decoder import Biases, DecoderForm, activation_of, describe_decoder, every_layer
from quantpipe.models.description import DecoderDescription
from quantpipe.models.qwen2 import qwen_windows
from quantpipe.models.rope_fields import RopeReader, rope_parameters

DEFAULT_HEAD_DIM = 128  # where a config.json leaves it out


def describe_qwen3(artifact: Artifact, rope: RopeReader) -> DecoderDescription:
    """The decoder that config.json declares. ArtifactError where a field asks for what this runtime does not do."""
    head_dim = optional_int(artifact, "head_dim", DEFAULT_HEAD_DIM) or DEFAULT_HEAD_DIM
    has_bias = bool(artifact.config.get("attention_bias", False))
    form = DecoderForm(
        head_dim=head_dim,
        ropes=every_layer(artifact, rope(artifact, rope_parameters(artifact.config), head_dim)),
        windows=qwen_windows(artifact),
        biases=Biases(has_bias, has_bias),
        activation=activation_of(artifact),
        has_head_norms=True,
    )
    return describe_decoder(artifact, form)
