"""Decoders as data: one description type, one file per family. Adding a family: one file and one line of FAMILIES."""

from collections.abc import Callable

from quantpipe.errors import UnservedError
from quantpipe.formats.artifact import Artifact
from quantpipe.models.config_fields import ANOTHER_RUNTIME
from quantpipe.models.description import DecoderDescription
from quantpipe.models.gemma3 import describe_gemma3
from quantpipe.models.llama import describe_llama
from quantpipe.models.mistral import describe_mistral
from quantpipe.models.phi3 import describe_phi3
from quantpipe.models.qwen2 import describe_qwen2
from quantpipe.models.qwen3 import describe_qwen3
from quantpipe.models.rope_fields import RopeReader, rope_limit

FAMILIES: dict[str, Callable[[Artifact, RopeReader], DecoderDescription]] = {
    "llama": describe_llama,
    "mistral": describe_mistral,
    "qwen2": describe_qwen2,
    "qwen3": describe_qwen3,
    "gemma3_text": describe_gemma3,
    "phi3": describe_phi3,
}


def describe(artifact: Artifact) -> DecoderDescription:
    """The decoder of a model folder, by its ``model_type``. UnservedError where no family here is of that type."""
    from quantpipe.models.rope import rope_spec  # imports torch

    return _described(artifact, rope_spec)


def describe_sizes(artifact: Artifact) -> DecoderDescription:
    """The same with ropes that hold no frequencies: for sums, without torch."""
    return _described(artifact, rope_limit)


def _described(artifact: Artifact, rope: RopeReader) -> DecoderDescription:
    model_type = artifact.config.get("model_type")
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnservedError(
            f"{artifact.folder}/config.json: model_type '{model_type}' is not served by the bundled runtime (it serves "
            f"{known}); give a model of one of these, or {ANOTHER_RUNTIME}"
        )
    return FAMILIES[str(model_type)](artifact, rope)
