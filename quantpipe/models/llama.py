"""The Llama family: Llama and SmolLM."""

from quantpipe.errors import ArtifactError
from quantpipe.formats.artifact import Artifact
from quantpipe.models.config_fields import optional_int
from quantpipe.models.decoder import Biases, DecoderForm, activation_of, default_head_dim, describe_decoder, every_layer
from quantpipe.models.description import DecoderDescription
from quantpipe.models.rope_fields import RopeReader, rope_parameters
from quantpipe.models.windows import same_window


def describe_llama(artifact: Artifact, rope: RopeReader) -> DecoderDescription:
    """The decoder that config.json declares. ArtifactError where a field asks for what this runtime does not do."""
    config = artifact.config
    windows = same_window(artifact, optional_int(artifact, "sliding_window", None))
    if any(windows):
        raise ArtifactError(
            f"{artifact.folder}/config.json: sliding_window {config['sliding_window']} is not supported for model_type "
            "'llama', which readers take to look at everything; if it is a Mistral, say model_type 'mistral'"
        )
    head_dim, has_bias = default_head_dim(artifact), bool(config.get("attention_bias", False))
    form = DecoderForm(
        head_dim=head_dim,
        ropes=every_layer(artifact, rope(artifact, rope_parameters(config), head_dim)),
        windows=windows,
        biases=Biases(has_bias, has_bias, mlp=bool(config.get("mlp_bias", False))),
        activation=activation_of(artifact),
    )
    return describe_decoder(artifact, form)
