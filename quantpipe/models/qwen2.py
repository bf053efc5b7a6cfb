"""The Qwen2 family, Qwen2 and Qwen2.5, without a sliding window: Llama with biases on queries, keys and values."""

from quantpipe.formats.artifact import Artifact
from quantpipe.models.config_fields import required_int
from quantpipe.models.description import DecoderDescription
from quantpipe.models.llama import Biases, describe_decoder

# What transformers assumes where a config.json leaves these out.
DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28
SLIDING = "sliding_attention"


def describe_qwen2(artifact: Artifact) -> DecoderDescription:
    """The decoder that config.json declares. ArtifactError where a field asks for what this runtime does not do."""
    return describe_decoder(artifact, Biases(query_key_value=True, output=False, mlp=False), _window(artifact))


def _window(artifact: Artifact) -> int | None:
    """The sliding window, if any layer has one: those from ``max_window_layers`` on, or as ``layer_types`` says."""
    config = artifact.config
    if not config.get("use_sliding_window", False):
        return None
    num_layers = required_int(artifact, "num_hidden_layers")
    num_full = config.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
    layer_types = config.get("layer_types") or [SLIDING] * max(0, num_layers - num_full)
    window: int | None = config.get("sliding_window", DEFAULT_WINDOW)
    return window if SLIDING in layer_types else None
