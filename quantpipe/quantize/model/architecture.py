"""Whether a model folder holds what can be quantized: a decoder-only language model with attention that can be watched.

Knows no names of models: transformers says of which kind each is.
"""

import textwrap
from typing import Any

from torch import nn

from quantpipe.errors import ArtifactError, nearest
from quantpipe.formats.artifact import Artifact

SUPPORTED = "supported are decoder-only language models that transformers loads as AutoModelForCausalLM"
ATTENTION = "scaled_dot_product_attention"
_MOST_SHOWN = 240


def causal_config(base: Artifact, trust_remote_code: bool = False, attention: str = "sdpa") -> Any:
    """The transformers configuration of a decoder-only language model, to be run with ``attention``. Builds nothing.

    Raises ArtifactError where config.json names any other kind of model, one that transformers does not know, or one
    that it runs with no attention but "eager".
    """
    from transformers import AutoConfig

    if trust_remote_code and "AutoConfig" in (base.config.get("auto_map") or {}):
        return AutoConfig.from_pretrained(base.folder, local_files_only=True, trust_remote_code=True)
    where = f"{base.folder}/config.json"
    _check_model_type(base, where)
    config = AutoConfig.from_pretrained(base.folder, local_files_only=True, trust_remote_code=trust_remote_code)
    if config.model_type != base.config["model_type"]:
        config = AutoConfig.for_model(**base.config)
    check_architectures(base)
    _check_kind(config, where, attention)
    return config


def check_architectures(base: Artifact) -> None:
    """Raise ArtifactError where config.json says that the weights are those of no causal language model."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    for name in base.config.get("architectures") or ():
        # a name that transformers does not know says nothing: old folders spell theirs otherwise
        if name not in causal and isinstance(getattr(transformers, str(name), None), type):
            raise ArtifactError(f"{base.folder}/config.json: holds a {name}; {SUPPORTED}")


def check_causal(module: nn.Module, base: Artifact) -> None:
    """Raise ArtifactError where no attention of ``module`` is causal: it reads text in both directions."""
    causal = [own["is_causal"] for own in map(vars, module.modules()) if "is_causal" in own]
    if causal and not any(causal):
        raise ArtifactError(
            f"{base.folder}/config.json: holds a {type(module).__name__} that attends in both directions; {SUPPORTED}"
        )


def load_refusal(error: Exception) -> str:
    """What transformers says of a model that it cannot build, in a line of bearable length."""
    is_plain = isinstance(error, ValueError | OSError | RuntimeError)  # written for people
    text = str(error) if is_plain and str(error) else f"{type(error).__name__}: {error}"
    return textwrap.shorten(text, _MOST_SHOWN, placeholder=" ...")


def _check_model_type(base: Artifact, where: str) -> None:
    from transformers import CONFIG_MAPPING, __version__

    model_type = base.config.get("model_type")
    if model_type in CONFIG_MAPPING:
        return
    if "AutoConfig" in (base.config.get("auto_map") or {}):
        raise ArtifactError(
            f"{where}: model_type {model_type!r} is computed by code in the folder; read that code, and set "
            "model.trust_remote_code: true to run it"
        )
    near = nearest(str(model_type), CONFIG_MAPPING)
    hint = f"; did you mean {near!r}?" if near is not None else "; update transformers, or give another model"
    raise ArtifactError(f"{where}: model_type {model_type!r} is unknown to transformers {__version__}{hint}")


def _check_kind(config: Any, where: str, attention: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = "an encoder beside the decoder" if config.is_encoder_decoder else "no causal language model"
        raise ArtifactError(f"{where}: model_type {config.model_type!r} has {kind}; {SUPPORTED}")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if attention != "eager" and not model_class._supports_sdpa:
        raise ArtifactError(
            f"{where}: holds a {model_class.__name__}, which transformers does not run with {ATTENTION}; {SUPPORTED} "
            "with that attention"
        )
