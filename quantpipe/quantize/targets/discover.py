"""The structure of a model, found by looking at it: its decoder blocks, and which linears to quantize, and how.

There are no lists of model names here. What cannot be handled is refused with a reason, before calibration.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from quantpipe.errors import RecipeError
from quantpipe.formats.artifact import matches
from quantpipe.formats.scheme import WeightScheme
from quantpipe.quantize.model.structure import UnrolledExperts, expert_linears
from quantpipe.quantize.targets.target_checks import (
    check_experts,
    check_fused_sets,
    check_group_sizes,
    check_outside,
    check_pattern,
    refuse_unknown_weights,
)

# Modules, and the scheme that a recipe's override stores them in.
Override = tuple[tuple[str, ...], WeightScheme]


@dataclass(frozen=True)
class DecoderBlocks:
    """The model's stack of decoder blocks; ``path`` is the stack's name in the model (``model.layers``)."""

    path: str
    blocks: Sequence[nn.Module]

    def name(self, index: int) -> str:
        return f"{self.path}.{index}"


@dataclass(frozen=True)
class Targets:
    """What is quantized, and how: full name of a linear -> its scheme, in the model's order.

    ``ignored`` names what stays in floating point: linears that were asked to, and the routers of mixtures. ``notes``
    are consequences that the user should know of.
    """

    schemes: Mapping[str, WeightScheme]
    ignored: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def inside(self, block_name: str) -> dict[str, WeightScheme]:
        """The targets of one block, by their name relative to it."""
        prefix = f"{block_name}."
        return {name.removeprefix(prefix): each for name, each in self.schemes.items() if name.startswith(prefix)}

    def outside(self, blocks_path: str) -> dict[str, WeightScheme]:
        """The targets that are in no block (the output head), by their full name."""
        return {name: each for name, each in self.schemes.items() if not name.startswith(f"{blocks_path}.")}


def find_blocks(model: nn.Module) -> DecoderBlocks:
    """The longest list of modules that contain linears, lists inside others apart. RecipeError where there is none."""
    stacks = [
        DecoderBlocks(name, list(module))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and all(_has_linear(block) for block in module) and len(module) > 0
    ]
    if not stacks:
        raise RecipeError(
            f"model: {type(model).__name__} has no stack of decoder blocks with Linear layers to quantize"
        )
    outer = [stack for stack in stacks if not any(stack.path.startswith(f"{other.path}.") for other in stacks)]
    return max(outer, key=lambda stack: len(stack.blocks))


def find_targets(
    model: nn.Module,
    blocks: DecoderBlocks,
    ignore: Sequence[str],
    scheme: WeightScheme,
    overrides: Sequence[Override] = (),
) -> Targets:
    """The linears to quantize, after every check that needs no data. Works on the meta device.

    Every linear of the blocks gets ``scheme``, or that of the last override that names it; routers and what ``ignore``
    names stay as they are. The output head is quantized only where an override gives it 8 bits.

    Raises RecipeError: an entry that names nothing, nothing left to quantize, a group size that does not fit, weights
    that are not Linear modules, linears outside the blocks that no entry speaks of, sets that runtimes fuse in
    different schemes, experts in a form that transformers does not load.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    routers = find_routers(model)
    names = list(dict.fromkeys([*linears, *routers]))
    for index, pattern in enumerate(ignore):
        check_pattern(f"quantize.ignore[{index}]", pattern, names)
    ignored = [name for name in names if name in routers or any(matches(name, pattern) for pattern in ignore)]
    schemes = _schemes({name: scheme for name in linears if name not in ignored}, ignored, overrides)
    chosen = {name: linears[name] for name in schemes}
    explicit = {name for name in chosen if any(matches(name, pattern) for each, _ in overrides for pattern in each)}
    outside = {name: each for name, each in schemes.items() if not name.startswith(f"{blocks.path}.")}
    check_outside(outside, explicit)
    if len(outside) == len(schemes):
        raise RecipeError("quantize.ignore: every Linear of the blocks is ignored, nothing is left to quantize")
    for index, block in enumerate(blocks.blocks):
        refuse_unknown_weights(block, blocks.name(index), routers)
    sections = {each: f"quantize.overrides[{index}].scheme" for index, (_, each) in enumerate(overrides)}
    check_group_sizes(chosen, schemes, sections | {scheme: "quantize.scheme"})
    check_schemes(model, schemes, ignored)
    return Targets(schemes, tuple(ignored), tuple(_tied_notes(model, outside)))


def check_schemes(model: nn.Module, schemes: Mapping[str, WeightScheme], ignored: Sequence[str]) -> None:
    """Raise RecipeError where linears that readers treat as one are in different schemes. Overrides or an allocation
    may have given them such."""
    check_fused_sets(schemes, ignored)
    check_experts(schemes, expert_linears(model))


def find_routers(model: nn.Module) -> list[str]:
    """Modules beside experts that give a number to each expert, or one to all: too small and too sensitive to quantize.

    vLLM runs them in floating point too.
    """
    routers = []
    for name, experts in model.named_modules():
        if not isinstance(experts, UnrolledExperts):
            continue
        parent = name.rpartition(".")[0]
        for child, module in model.get_submodule(parent).named_children():
            weight = dict(module.named_parameters(recurse=False)).get("weight")
            if weight is not None and weight.ndim == 2 and len(weight) in (1, experts.num_experts):
                routers.append(f"{parent}.{child}")
    return routers


def shared_input_groups(first_inputs: Sequence[tuple[str, Tensor]]) -> list[list[str]]:
    """Linears grouped by the tensor they read, in order of execution, from (name, input) pairs of one run."""
    groups: list[tuple[tuple[int, tuple[int, ...]], list[str]]] = []
    for name, x in first_inputs:
        key = (x.data_ptr(), tuple(x.shape))
        if groups and groups[-1][0] == key:
            groups[-1][1].append(name)
        else:
            groups.append((key, [name]))
    return [names for _, names in groups]


def _has_linear(module: nn.Module) -> bool:
    return any(isinstance(child, nn.Linear) for child in module.modules())


def _schemes(
    wanted: dict[str, WeightScheme], ignored: Sequence[str], overrides: Sequence[Override]
) -> dict[str, WeightScheme]:
    """The scheme of each linear after ``overrides``, of which the last that names it counts."""
    for index, (patterns, scheme) in enumerate(overrides):
        for place, pattern in enumerate(patterns):
            key = f"quantize.overrides[{index}].modules[{place}]"
            check_pattern(key, pattern, [*wanted, *ignored])
            named = [name for name in wanted if matches(name, pattern)]
            if not named:
                raise RecipeError(
                    f"{key}: '{pattern}' names only what is ignored; take it from `ignore` to quantize it"
                )
            wanted |= dict.fromkeys(named, scheme)
    return wanted


def _tied_notes(model: nn.Module, outside: Mapping[str, WeightScheme]) -> list[str]:
    shared = [id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)]
    return [
        f"{name} shares the embedding's weight; it is stored apart from it now, and tie_word_embeddings becomes false"
        for name in outside
        if id(model.get_submodule(name).weight) in shared
    ]
