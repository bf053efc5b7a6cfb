"""How far back each layer of a config.json looks: a window of tokens, or everything."""

from collections.abc import Sequence

from quantpipe.errors import ArtifactError, suggest
from quantpipe.formats.artifact import Artifact
from quantpipe.models.config_fields import required_int

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_types(artifact: Artifact, default: Sequence[str]) -> tuple[str, ...]:
    """``layer_types``, one for each layer; ``default`` where config.json leaves it out."""
    found = tuple(artifact.config.get("layer_types") or default)
    where, num_layers = f"{artifact.folder}/config.json", required_int(artifact, "num_hidden_layers")
    if len(found) != num_layers:
        raise ArtifactError(f"{where}: layer_types names {len(found)} layers; num_hidden_layers is {num_layers}")
    for unknown in sorted({str(kind) for kind in found} - {FULL, SLIDING}):
        raise ArtifactError(f"{where}: unknown layer type '{unknown}'{suggest(unknown, (FULL, SLIDING))}")
    return found


def windows_of(artifact: Artifact, kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """The window of each layer. One that no context can outgrow is none."""
    if SLIDING in kinds and window is None:
        raise ArtifactError(f"{artifact.folder}/config.json: layer_types has {SLIDING}, yet sliding_window is null")
    limit = required_int(artifact, "max_position_embeddings")
    used = None if window is None or window >= limit else window
    return tuple(used if kind == SLIDING else None for kind in kinds)


def same_window(artifact: Artifact, window: int | None) -> tuple[int | None, ...]:
    """One window, or none, for every layer; ``layer_types`` that say otherwise are refused."""
    kind = FULL if window is None else SLIDING
    kinds = layer_types(artifact, [kind] * required_int(artifact, "num_hidden_layers"))
    for other in sorted(set(kinds) - {kind}):
        raise ArtifactError(
            f"{artifact.folder}/config.json: layer_types has {other}, yet sliding_window {window} is every layer's in "
            f"model_type '{artifact.config['model_type']}'"
        )
    return windows_of(artifact, kinds, window)
