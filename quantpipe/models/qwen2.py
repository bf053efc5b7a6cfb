"""The Qwen2 family, Qwen2 and Qwen2.5: Llama with biases on queries, keys and values; some layers may have a window."""

from quantpipe.errors import ArtifactError
from quantpipe.formats.artifact import Artifact
from quantpipe.models.config_fields import optional_int, required_int
from quantpipe.models.decoder import Biases, DecoderForm, activation_of, default_head_dim, describe_decoder, every_layer
from quantpipe.models.description import DecoderDescription
from quantpipe.models.rope_fields import RopeReader, rope_parameters
from quantpipe.models.windows import FULL, SLIDING, layer_types, windows_of

# What transformers assumes where a config.json leaves these out.
DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28


def describe_qwen2(artifact: Artifact, rope: RopeReader) -> DecoderDescription:
    """The decoder that config.json declares. ArtifactError where a field asks for what this runtime does not do."""
    head_dim = default_head_dim(artifact)
    form = DecoderForm(
        head_dim=head_dim,
        ropes=every_layer(artifact, rope(artifact, rope_parameters(artifact.config), head_dim)),
        windows=qwen_windows(artifact),
        biases=Biases(query_key_value=True),
        activation=activation_of(artifact),
    )
    return describe_decoder(artifact, form)


def qwen_windows(artifact: Artifact) -> tuple[int | None, ...]:
    """Those of the layers from ``max_window_layers`` on, or as ``layer_types`` says, if windows are used at all."""
    config, num_layers = artifact.config, required_int(artifact, "num_hidden_layers")
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    num_full = config.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
    if not isinstance(num_full, int) or isinstance(num_full, bool) or num_full < 0:
        where = f"{artifact.folder}/config.json"
        raise ArtifactError(f"{where}: max_window_layers: {num_full!r} is not a whole number of at least 0")
    kinds = layer_types(artifact, [SLIDING if index >= num_full else FULL for index in range(num_layers)])
    return windows_of(artifact, kinds, optional_int(artifact, "sliding_window", DEFAULT_WINDOW))
