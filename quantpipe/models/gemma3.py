"""The Gemma 3 family, text models: sliding and full layers with a rope each, norms around attention and MLP whose
weights are stored less one, norms of queries and keys per head, scaled embeddings."""

from typing import Any

from quantpipe.errors import ArtifactError
from quantpipe.formats.artifact import Artifact
from quantpipe.models.config_fields import optional_int, positive_number, require_value, required_int
from quantpipe.models.decoder import Biases, DecoderForm, activation_of, describe_decoder
from quantpipe.models.description import DecoderDescription, RopeSpec
from quantpipe.models.rope_fields import RopeReader
from quantpipe.models.windows import FULL, SLIDING, layer_types, windows_of

# What transformers assumes where a config.json leaves these out.
DEFAULT_HEAD_DIM = 256
DEFAULT_QUERY_SCALAR = 256
DEFAULT_WINDOW = 4096
DEFAULT_PATTERN = 6  # each sixth layer sees everything
DEFAULT_THETA = {FULL: 1_000_000.0, SLIDING: 10_000.0}
LEGACY_THETA = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}


def describe_gemma3(artifact: Artifact, rope: RopeReader) -> DecoderDescription:
    """The decoder that config.json declares. ArtifactError where a field asks for what this runtime does not do."""
    config = artifact.config
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        require_value(artifact, key, config.get(key), None)
    require_value(artifact, "use_bidirectional_attention", bool(config.get("use_bidirectional_attention")), False)
    head_dim = optional_int(artifact, "head_dim", DEFAULT_HEAD_DIM) or DEFAULT_HEAD_DIM
    kinds = layer_types(artifact, _default_types(artifact))
    ropes = {kind: _rope(artifact, kind, head_dim, rope) for kind in set(kinds)}
    has_bias = bool(config.get("attention_bias", False))
    form = DecoderForm(
        head_dim=head_dim,
        ropes=tuple(ropes[kind] for kind in kinds),
        windows=windows_of(artifact, kinds, optional_int(artifact, "sliding_window", DEFAULT_WINDOW)),
        biases=Biases(has_bias, has_bias),
        activation=activation_of(artifact, "hidden_activation", "gelu_pytorch_tanh"),
        norm_offset=1.0,
        softmax_scale=positive_number(artifact, "query_pre_attn_scalar", DEFAULT_QUERY_SCALAR) ** -0.5,
        embedding_scale=required_int(artifact, "hidden_size") ** 0.5,
        has_head_norms=True,
        is_sandwiched=True,
        is_tied_by_default=True,
    )
    return describe_decoder(artifact, form)


def _default_types(artifact: Artifact) -> list[str]:
    """Before ``layer_types`` a config told which layers see everything by a period."""
    period = optional_int(artifact, "sliding_window_pattern", DEFAULT_PATTERN) or DEFAULT_PATTERN
    return [SLIDING if (index + 1) % period else FULL for index in range(required_int(artifact, "num_hidden_layers"))]


def _of_kind(artifact: Artifact, kind: str) -> dict[str, Any]:
    """What ``rope_parameters`` says of one type of layer."""
    found = (artifact.config.get("rope_parameters") or {}).get(kind) or {}
    if not isinstance(found, dict):
        raise ArtifactError(f"{artifact.folder}/config.json: rope_parameters.{kind}: {found!r} is not a mapping")
    return dict(found)


def _rope(artifact: Artifact, kind: str, head_dim: int, rope: RopeReader) -> RopeSpec:
    """The rope of one type of layer; in the older spelling only full attention was ever scaled."""
    config = artifact.config
    found: dict[str, Any] = _of_kind(artifact, kind)
    if kind == FULL:
        found |= config.get("rope_scaling") or {}
    theta = positive_number(artifact, LEGACY_THETA[kind], DEFAULT_THETA[kind])
    return rope(artifact, {"rope_theta": theta, **found}, head_dim)
