"""Which linears read inputs whose tokens lie in one dimension, found by running a block of every kind.

compressed-tensors rounds activations inside transformers by one scale for each index of the first two dimensions. That
is a token's own where inputs are [S, L, K]. Of an input [T, K], as in OPT's MLP, it takes the largest value of all
tokens, which is not what other readers compute. Knows nothing of what the linears compute.

Shapes: S sequences, L tokens per sequence, T tokens, K in_features.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantpipe.errors import RecipeError
from quantpipe.formats.scheme import WeightScheme
from quantpipe.quantize.model.block_runs import Batch, Entrance, run_block
from quantpipe.quantize.model.documents_apart import one_of_each_kind
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.model.structure import expert_linears

NUM_TOKENS = 4
NUM_DIMENSIONS = 3  # [S, L, K]


@torch.no_grad()
def check_token_scales(
    model: StreamedModel, schemes: Mapping[str, WeightScheme], sections: Mapping[WeightScheme, str]
) -> None:
    """Raise RecipeError where linears are to round each token's activations, which transformers would not do of theirs.

    ``sections``: the key path that each scheme comes from. A model that does more between its blocks than hand on the
    hidden states is not looked at: whatever runs its blocks refuses it.
    """
    rounding = {name for name, scheme in schemes.items() if scheme.activation_bits is not None}
    if not rounding:
        return
    embedding: Any = model.module.get_input_embeddings()  # type: ignore[operator]  # all transformers models
    ids_SL = torch.arange(NUM_TOKENS)[None] % len(embedding.weight)
    try:
        entered_SLD, kwargs = Entrance(model).run(ids_SL.numpy())
    except RecipeError:
        return
    experts = set(expert_linears(model.module))  # loaded in another way, and checked by their own rule
    flat: dict[str, str] = {}
    for index in one_of_each_kind(model, kwargs):
        one = Batch(entered_SLD, kwargs[index]).first_sequence(torch.float32)
        block, prefix = model.load_block(index).float(), f"{model.blocks.name(index)}."
        for leaf in _flat(block, one):
            if f"{prefix}{leaf}" in rounding - experts:
                flat.setdefault(leaf, f"{prefix}{leaf}")
    if flat:
        first = next(iter(flat.values()))
        raise RecipeError(
            f"{sections[schemes[first]]}: {first} is to be {schemes[first].label}, but transformers would round all "
            f"tokens that it reads by one scale instead of each by its own; store such linears in another: "
            f"overrides: [{{modules: [{', '.join(_patterns(model.blocks.path, flat))}], scheme: w8a16}}], or list "
            "them under quantize.ignore"
        )


def _flat(block: nn.Module, one: Batch) -> list[str]:
    """The linears of ``block`` whose input has not three dimensions, in order of execution."""
    found: list[str] = []

    def look(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _module, args: found.append(name) if args[0].ndim != NUM_DIMENSIONS else None

    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(look(name))
    run_block(block, one)
    return found


def _patterns(blocks_path: str, leaves: Iterable[str]) -> list[str]:
    """Entries for a recipe that name these linears in every block."""
    return [f"'re:{_escaped(blocks_path)}[.][0-9]+[.]{_escaped(leaf)}$'" for leaf in leaves]


def _escaped(name: str) -> str:
    return name.replace(".", "[.]")
