"""What must hold of the linears chosen for quantization, checked on names, shapes and schemes before anything runs."""

import difflib
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from quantpipe.errors import RecipeError
from quantpipe.formats.artifact import matches
from quantpipe.formats.scheme import GROUP_SIZES, WeightScheme

# vLLM runs these as one matrix each, so their members must share a scheme or all be left alone.
FUSED_SETS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
EXPERTS_PATTERN = "re:.*[.]experts[.].*"
EIGHT_BIT_EXPERTS = f"overrides: [{{modules: ['{EXPERTS_PATTERN}'], scheme: w8a16}}]"


def check_pattern(key: str, pattern: str, names: Sequence[str]) -> None:
    """Raise RecipeError where an entry of the recipe names none of the modules."""
    if not any(matches(name, pattern) for name in names):
        nearest = difflib.get_close_matches(pattern.removeprefix("re:"), names, n=1, cutoff=0.6)
        hint = f"did you mean '{nearest[0]}'?" if nearest else f"names are like {names[0]}"
        raise RecipeError(f"{key}: '{pattern}' names no Linear of the model; {hint}")


def check_outside(outside: Mapping[str, WeightScheme], explicit: Collection[str]) -> None:
    """Raise RecipeError for linears outside the blocks, but the output head where an override stores it in 8 bits."""
    for name, scheme in outside.items():
        if name not in explicit:
            raise RecipeError(
                f"quantize.ignore: {name} lies outside the decoder blocks and is quantized only by name; list it here, "
                "or under quantize.overrides with a scheme of 8 bits"
            )
        if scheme.bits != 8 or scheme.activation_bits is not None:
            raise RecipeError(
                f"quantize.overrides: {name} lies outside the decoder blocks and cannot be stored as {scheme.name}; "
                "use w8a16, or list it under quantize.ignore"
            )


def check_group_sizes(
    linears: Mapping[str, nn.Linear], schemes: Mapping[str, WeightScheme], sections: Mapping[WeightScheme, str]
) -> None:
    """Raise RecipeError where a group size does not divide the input width of its linears; name the sizes that do.

    ``sections``: the key path that each scheme comes from.
    """
    for scheme in dict.fromkeys(schemes.values()):
        size = scheme.group_size
        if size is None:
            continue
        widths = {name: linears[name].in_features for name, each in schemes.items() if each == scheme}
        odd = [name for name, width in widths.items() if width % size]
        if not odd:
            continue
        legal = [str(other) for other in GROUP_SIZES if all(width % other == 0 for width in widths.values())]
        named = odd[0] if len(odd) == 1 else f"{odd[0]} and of {len(odd) - 1} more linears"
        raise RecipeError(
            f"{sections[scheme]}.group_size: {size} does not divide the {widths[odd[0]]} input features of {named}; "
            f"use {' or '.join([*legal, 'channel'])}, or list them under quantize.ignore"
        )


def check_fused_sets(schemes: Mapping[str, WeightScheme], ignored: Sequence[str]) -> None:
    """Raise RecipeError where linears that vLLM runs as one matrix differ in scheme, or only some are ignored."""
    for name in [*ignored, *schemes]:
        parent, _, leaf = name.rpartition(".")
        for fused in FUSED_SETS:
            beside = [f"{parent}.{other}" for other in fused] if leaf in fused else []
            other = next((each for each in beside if each in schemes and schemes[each] != schemes.get(name)), None)
            if other is None:
                continue
            if name not in schemes:
                raise RecipeError(
                    f"quantize.ignore: {name} is ignored but not all of {', '.join(fused)} beside it; vLLM runs "
                    "them as one matrix, so ignore all or none"
                )
            raise RecipeError(
                f"quantize.overrides: {name} is to be {schemes[name].label} but {other} {schemes[other].label}; "
                f"vLLM runs {', '.join(fused)} as one matrix, so give all the same scheme"
            )


def check_experts(schemes: Mapping[str, WeightScheme], experts: Sequence[str]) -> None:
    """Raise RecipeError for experts in a form that transformers does not load from a quantized folder.

    It reads all experts of a model by one scheme, weights packed and symmetric, and drops those that are not quantized.
    """
    for name in experts:
        scheme, first = schemes.get(name), schemes.get(experts[0])
        if scheme is None:
            raise RecipeError(
                f"quantize.ignore: {name} is ignored, but transformers drops experts that are not quantized from a "
                f"quantized folder; take it from the list, or store experts in 8 bits: {EIGHT_BIT_EXPERTS}"
            )
        if not scheme.is_packed or scheme.activation_bits is not None or not scheme.symmetric:
            raise RecipeError(
                f"quantize.scheme: {name} is to be {scheme.label}, in which transformers does not load experts; "
                f"store them in another: {EIGHT_BIT_EXPERTS}"
            )
        if scheme != first and first is not None:
            raise RecipeError(
                f"quantize.overrides: {name} is to be {scheme.label} but {experts[0]} {first.label}; transformers "
                f"loads all experts of a model by one scheme, so name them all: {EXPERTS_PATTERN}"
            )


def refuse_unknown_weights(block: nn.Module, block_name: str, routers: Collection[str]) -> None:
    """Raise RecipeError where a block multiplies by a weight that is not of a Linear, and so would stay as it is."""
    for module_name, module in block.named_modules():
        path = ".".join(filter(None, (block_name, module_name)))
        if isinstance(module, nn.Linear) or path in routers:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim >= 2:
                raise RecipeError(
                    f"model: {path}.{name} is a {parameter.ndim}-D weight of a {type(module).__name__}, not of a Linear"
                    "; this architecture cannot be quantized yet"
                )
