"""Rotating what lies outside the decoder blocks: embeddings, final norm, output head. Untied, folded, proved.

The proof runs the model without its blocks in float64, with a few rows of the embeddings and the head, so that it needs
neither memory nor time for a vocabulary.

Shapes: S sequences, L tokens, D hidden size, V vocabulary.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantpipe.errors import RecipeError
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.targets.discover import DecoderBlocks
from quantpipe.quantize.transforms.hadamard import Rotation
from quantpipe.quantize.transforms.stream import (
    ADVICE,
    PROOF_TOLERANCE,
    StreamUsers,
    fold_norms,
    rotate_users,
    users_of,
    watching,
)

# Rows of embeddings and head that the proof uses; more than its tokens, their positions and any offset of these.
PROBE_ROWS = 256
PROBE_TOKENS = 64


@dataclass(frozen=True)
class _Run:
    """Logits and what entered the first block, when every block hands on its input."""

    entered_LD: Tensor
    logits_LV: Tensor


def probe_ids(model: StreamedModel) -> Tensor:
    """Token ids [1, L] that every vocabulary has."""
    embedding: nn.Module = model.module.get_input_embeddings()  # type: ignore[operator]  # all transformers models
    return (torch.arange(PROBE_TOKENS) % len(embedding.get_parameter("weight"))).unsqueeze(0)


@torch.no_grad()
def users_outside(model: StreamedModel, output_kind: Any) -> StreamUsers:
    """What reads and writes the stream outside the blocks. ``output_kind`` is what a block gives out, for its form.

    Raises RecipeError where the stream that enters the blocks does not come from embeddings.
    """
    small = _small_copy(model)
    names = _modules_outside(small)
    with watching(small.module, names) as trace:
        run = _run(small, probe_ids(model), output_kind)
    users = users_of(small.module, names, trace, run.entered_LD, "")
    for name in users.unread:
        raise RecipeError(f"quantize.transforms: rotate: no matrix reads what {name} gives out; {ADVICE}")
    return users


@torch.no_grad()
def prove_outside(model: StreamedModel, users: StreamUsers, rotation: Rotation, output_kind: Any) -> float:
    """The relative error of the logits and of what enters the blocks when both are rotated; RecipeError where large."""
    small = _small_copy(model)
    before = _run(small, probe_ids(model), output_kind)
    rotate_outside(small.module, users, rotation)
    after = _run(small, probe_ids(model), output_kind)
    expected_LD = rotation.apply(before.entered_LD)
    error = float((after.entered_LD - expected_LD).norm() / expected_LD.norm())
    if not error <= PROOF_TOLERANCE:
        found = ", ".join(users.writers)
        raise RecipeError(
            f"quantize.transforms: rotate: rotating {found} does not rotate what enters {model.blocks.name(0)} "
            f"(off by {error:.1%}); {ADVICE}"
        )
    head_error = float((after.logits_LV - before.logits_LV).norm() / before.logits_LV.norm())
    if not head_error <= PROOF_TOLERANCE:
        found = ", ".join(name for group in users.readers for name in group.names) or "no output head"
        raise RecipeError(
            f"quantize.transforms: rotate: with {found} rotated the logits change by {head_error:.1%}; {ADVICE}"
        )
    return max(error, head_error)


@torch.no_grad()
def rotate_outside(module: nn.Module, users: StreamUsers, rotation: Rotation) -> None:
    """Untie what is tied, fold the norms into the head, and rotate, in place and in the dtype of the parameters."""
    embeddings = [module.get_submodule(name).get_parameter("weight") for name in users.writers]
    for name in (name for group in users.readers for name in group.names):
        head = module.get_submodule(name)
        if any(head.get_parameter("weight") is embedding for embedding in embeddings):
            apart = head.get_parameter("weight").detach().clone()
            head.register_parameter("weight", nn.Parameter(apart, requires_grad=False))
    fold_norms(module, users, "")
    rotate_users(module, users, rotation)


def _modules_outside(model: StreamedModel) -> list[str]:
    prefix = f"{model.blocks.path}."
    return [name for name, _ in model.module.named_modules() if name and not name.startswith(prefix)]


def _small_copy(model: StreamedModel) -> StreamedModel:
    """The model in float64 with the first rows of its embeddings and output head only."""
    head = model.module.get_output_embeddings()  # type: ignore[operator]  # all transformers models
    sliced = [head] + [part for part in model.module.modules() if isinstance(part, nn.Embedding)]
    few = {id(parameter) for part in sliced if part is not None for parameter in part.parameters(recurse=False)}
    memo: dict[int, Any] = {id(model.module.config): model.module.config}
    for name in model.outside():
        parameter = model.module.get_parameter(name)
        kept = parameter[:PROBE_ROWS] if id(parameter) in few else parameter
        memo[id(parameter)] = nn.Parameter(kept.detach().double().clone(), requires_grad=False)
    module = copy.deepcopy(model.module, memo)
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            part.padding_idx = None
    blocks = DecoderBlocks(model.blocks.path, list(module.get_submodule(model.blocks.path).children()))
    return replace(model, module=module, blocks=blocks)


def _run(model: StreamedModel, ids_1L: Tensor, output_kind: Any) -> _Run:
    entered: list[Tensor] = []

    def hand_on(*args: Any, **kwargs: Any) -> Any:
        hidden_SLD = args[0] if args else kwargs["hidden_states"]
        entered.append(hidden_SLD)
        return (hidden_SLD, *output_kind[1:]) if isinstance(output_kind, tuple) else hidden_SLD

    with model.replaced([hand_on] * len(model.blocks.blocks)):
        logits_LV = model.module(input_ids=ids_1L, use_cache=False).logits[0]
    return _Run(entered[0][0], logits_LV)
