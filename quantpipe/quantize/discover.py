"""The structure of a model, found by looking at it and running it: its decoder blocks, and which linears to quantize.

There are no lists of model names here. What cannot be handled is refused with a reason, before calibration.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from quantpipe.errors import RecipeError
from quantpipe.formats.artifact import matches
from quantpipe.formats.scheme import WeightScheme

# vLLM runs these as one matrix each, so their members must share a scheme or all be left alone.
FUSED_SETS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class DecoderBlocks:
    """The model's stack of decoder blocks; ``path`` is the stack's name in the model (``model.layers``)."""

    path: str
    blocks: Sequence[nn.Module]

    def name(self, index: int) -> str:
        return f"{self.path}.{index}"


@dataclass(frozen=True)
class Targets:
    """What is quantized: full name -> linear inside the blocks. ``ignored`` names the linears left as they are."""

    linears: Mapping[str, nn.Linear]
    ignored: tuple[str, ...]

    def inside(self, block_name: str) -> dict[str, nn.Linear]:
        """The targets of one block, by their name relative to it."""
        prefix = f"{block_name}."
        return {name.removeprefix(prefix): m for name, m in self.linears.items() if name.startswith(prefix)}


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


def find_targets(model: nn.Module, blocks: DecoderBlocks, ignore: Sequence[str], scheme: WeightScheme) -> Targets:
    """The linears to quantize, after every check that needs no data.

    Raises RecipeError: nothing left to quantize, a group size that does not fit, an output head asked to be
    quantized, weights that are not Linear modules, fused sets ignored in part, an ignore entry that names nothing.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for pattern in ignore:
        if not any(matches(name, pattern) for name in linears):
            raise RecipeError(
                f"quantize.ignore: '{pattern}' names no Linear of the model (such as {next(iter(linears))})"
            )
    ignored = tuple(name for name in linears if any(matches(name, pattern) for pattern in ignore))
    chosen = {name: module for name, module in linears.items() if name not in ignored}
    inside = {name: module for name, module in chosen.items() if name.startswith(f"{blocks.path}.")}
    for name in chosen.keys() - inside.keys():
        raise RecipeError(
            f"quantize.ignore: {name} lies outside the decoder blocks and cannot be quantized; list it here"
        )
    if not inside:
        raise RecipeError("quantize.ignore: every Linear is ignored, nothing is left to quantize")
    _refuse_unknown_weights(blocks)
    for name, module in inside.items():
        scheme.check_fits(name, module.in_features)
    _refuse_split_fused_sets(inside, ignored)
    return Targets(inside, ignored)


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


def _refuse_unknown_weights(blocks: DecoderBlocks) -> None:
    for index, block in enumerate(blocks.blocks):
        for module_name, module in block.named_modules():
            if isinstance(module, nn.Linear):
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim >= 2:
                    where = ".".join(filter(None, (blocks.name(index), module_name, name)))
                    raise RecipeError(
                        f"model: {where} is a {parameter.ndim}-D weight of a {type(module).__name__}, not of a Linear; "
                        "this architecture cannot be quantized yet"
                    )


def _refuse_split_fused_sets(chosen: Mapping[str, nn.Linear], ignored: Sequence[str]) -> None:
    for name in ignored:
        parent, _, leaf = name.rpartition(".")
        for fused in FUSED_SETS:
            if leaf in fused and any(f"{parent}.{other}" in chosen for other in fused):
                raise RecipeError(
                    f"quantize.ignore: {name} is ignored but not all of {', '.join(fused)} beside it; vLLM runs "
                    "them as one matrix, so ignore all or none"
                )
