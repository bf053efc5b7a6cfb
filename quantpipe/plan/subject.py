"""What is planned: a recipe, an artifact, a model folder or a config.json, read into one shape. Fetches nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantpipe.errors import ArtifactError, DataError, RecipeError, UnservedError, suggest
from quantpipe.formats.artifact import Artifact, matches
from quantpipe.formats.digests import MANIFEST_NAME, read_json
from quantpipe.formats.dtypes import DTYPE_BYTES, num_bytes_of
from quantpipe.formats.kv_mode import kv_mode
from quantpipe.formats.scheme import WeightScheme
from quantpipe.models import FAMILIES, describe_sizes
from quantpipe.plan.shape import LinearShape, ModelShape, shape_of
from quantpipe.plan.unserved import shape_from_fields
from quantpipe.plan.weights import SCHEMES, linear_bits
from quantpipe.recipe.quantize_section import AllocateSection, QuantizeSection
from quantpipe.recipe.schema import load_recipe
from quantpipe.recipe.schemes import scheme_of

if TYPE_CHECKING:
    from quantpipe.recipe.schema import Recipe

CONFIG_NAME = "config.json"
RECIPE_SUFFIXES = (".yaml", ".yml")
DEFAULT_FLOAT_BYTES = 2
DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Subject:
    """``shape`` is what is served, quantized or not, ``base`` what it is made from. ``recipe`` where one was given."""

    shape: ModelShape
    base: ModelShape
    kv_dtype: str
    recipe: "Recipe | None" = None


def read_subject(path: Path, overrides: Sequence[str], config: Path | None, cache_folder: Path) -> Subject:
    """RecipeError for a recipe with mistakes; DataError for what is no model or lacks a field."""
    if path.suffix in RECIPE_SUFFIXES:
        return _of_recipe(load_recipe(path, overrides), config, cache_folder)
    for option, is_given in (("--set", bool(overrides)), ("--config", config is not None)):
        if is_given:
            raise RecipeError(f"{option}: only a recipe has values to replace; {path} is none")
    if path.is_dir():
        shape, artifact = _of_folder(path)
        return Subject(shape, shape.in_scheme(None), _kv_dtype(artifact))
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder; give a recipe, a model folder or a config.json")
    shape = _of_config(path)
    return Subject(shape, shape, "auto")


def _kv_dtype(artifact: Artifact) -> str:
    try:
        kv_mode(artifact.kv_cache, f"{artifact.folder / MANIFEST_NAME}: kv_cache")
    except RecipeError as error:
        raise ArtifactError(str(error)) from error
    return artifact.kv_cache


def changed(subject: Subject, scheme: str | None, kv_dtype: str | None) -> Subject:
    """With other weights or another KV cache, where they are asked for. RecipeError for an unknown name."""
    if kv_dtype is not None:
        kv_mode(kv_dtype, "--kv-dtype")
        subject = replace(subject, kv_dtype=kv_dtype)
    if scheme is None:
        return subject
    if scheme not in SCHEMES:
        raise RecipeError(f"--scheme: unknown '{scheme}'{suggest(scheme, SCHEMES)}")
    return replace(subject, shape=subject.base.in_scheme(SCHEMES[scheme]))


def default_context(shape: ModelShape) -> int:
    """The model's own limit, at most 4096, as the engine has it."""
    return min(shape.max_positions or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def _of_recipe(recipe: "Recipe", config: Path | None, cache_folder: Path) -> Subject:
    base = _of_config(config) if config is not None else _base_of_recipe(recipe, cache_folder)
    if recipe.quantize is None:
        return Subject(base, base, "auto", recipe)
    return Subject(quantized(base, recipe.quantize), base, recipe.quantize.kv_cache, recipe)


def _base_of_recipe(recipe: "Recipe", cache_folder: Path) -> ModelShape:
    from quantpipe.sources.base_model import local_config

    found = local_config(recipe.model, recipe.folder, cache_folder)
    if found is None:
        raise DataError(
            f"model.source: {recipe.model.source} is not on this machine yet, and a plan fetches nothing; give its "
            "config.json by --config"
        )
    return _of_config(found)


def quantized(base: ModelShape, section: QuantizeSection) -> ModelShape:
    """The shape that a recipe's section makes of ``base``. RecipeError where a group size does not divide."""
    linears = tuple(replace(each, scheme=_scheme(each, section)) for each in base.linears)
    lm_head = replace(base.lm_head, scheme=_scheme(base.lm_head, section))
    for each in (*linears, lm_head):
        if each.scheme is not None:
            each.scheme.check_fits(each.name, each.in_features)
    is_rotated = any(each.name == "rotate" for each in section.transforms)
    is_head_tied = base.is_head_tied and lm_head.scheme is None and not is_rotated
    notes = base.notes
    if section.allocate is not None:
        linears = _allocated(linears, section)
        notes = (*notes, "which linears get more bits is measured when quantizing; here, the first that the budget has")
    return replace(base, linears=linears, lm_head=lm_head, is_head_tied=is_head_tied, notes=notes)


def _scheme(linear: LinearShape, section: QuantizeSection) -> WeightScheme | None:
    if any(matches(linear.name, pattern) for pattern in section.ignore):
        return None
    found = scheme_of(section.scheme)
    for override in section.overrides:
        if any(matches(linear.name, pattern) for pattern in override.modules):
            found = scheme_of(override.scheme)
    return found


def _allocated(linears: Sequence[LinearShape], section: QuantizeSection) -> tuple[LinearShape, ...]:
    """As many linears in the larger scheme as the budget allows, from the first on."""
    assert section.allocate is not None, "the caller has looked"
    low, high = scheme_of(section.scheme), scheme_of(section.allocate.scheme)
    most_bits = _budget_bits(linears, section.allocate)
    used_bits = sum(linear_bits(each) for each in linears if each.scheme is not None)
    chosen = []
    for each in linears:
        upgraded = replace(each, scheme=high)
        more_bits = linear_bits(upgraded) - linear_bits(each) if each.scheme == low else 0
        is_upgraded = each.scheme == low and used_bits + more_bits <= most_bits
        used_bits += more_bits if is_upgraded else 0
        chosen.append(upgraded if is_upgraded else each)
    return tuple(chosen)


def _budget_bits(linears: Sequence[LinearShape], allocate: AllocateSection) -> float:
    if allocate.max_bytes is not None:
        return 8 * allocate.max_bytes
    assert allocate.average_bits is not None, "a recipe gives one of the two"
    return allocate.average_bits * sum(each.num_weights for each in linears if each.scheme is not None)


def _of_folder(folder: Path) -> tuple[ModelShape, Artifact]:
    """With weights, their headers say what is stored how; a folder of a config.json alone will do as well."""
    if any(folder.glob("*.safetensors")):
        artifact = Artifact.open(folder)
        return _shape(artifact, folder / CONFIG_NAME), artifact
    config = folder / CONFIG_NAME
    if not config.is_file():
        raise ArtifactError(f"{folder}: holds no {CONFIG_NAME}; give a recipe, a model folder or a config.json")
    return _of_config(config), Artifact(folder, {}, None, {})


def _of_config(path: Path) -> ModelShape:
    config = read_json(path)
    note: tuple[str, ...] = ()
    if isinstance(config.get("text_config"), Mapping) and "num_hidden_layers" not in config:
        note, config = ("only text_config is planned: the text part of a larger model",), dict(config["text_config"])
    if config.get("quantization_config"):
        note = (*note, "how its weights are quantized is read from a folder with weights, not from config.json alone")
    shape = _shape(Artifact(path.parent, config, None, {}), path)
    return replace(shape, notes=(*note, *shape.notes))


def _shape(artifact: Artifact, path: Path) -> ModelShape:
    where = str(path)
    float_bytes = _float_bytes(artifact)
    reason = ""
    try:
        if artifact.config.get("model_type") in FAMILIES:
            return shape_of(describe_sizes(artifact), where, float_bytes)
    except UnservedError as error:
        reason = str(error)
    except ArtifactError as error:  # written for folders, whose configuration has one name
        raise ArtifactError(str(error).replace(str(path.parent / CONFIG_NAME), where)) from error
    shape = shape_from_fields(artifact.config, where, float_bytes)
    return replace(shape, notes=(*shape.notes, reason)) if reason else shape


def _float_bytes(artifact: Artifact) -> int:
    """Of the embedding as it is stored; without weights, of what config.json names."""
    embedding = artifact.stored.get("model.embed_tokens.weight")
    if embedding is not None:
        return DTYPE_BYTES[embedding.spec.dtype]
    config: Mapping[str, Any] = artifact.config
    named = config.get("dtype", config.get("torch_dtype"))
    return num_bytes_of(str(named)) or DEFAULT_FLOAT_BYTES
