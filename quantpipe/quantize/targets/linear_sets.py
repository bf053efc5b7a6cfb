"""Sets of linears that must share a scheme: found by what they read, and rounded for a trial.

Shapes: T tokens, N out_features, K in_features.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantpipe.errors import DataError
from quantpipe.formats.artifact_writer import QuantWeight
from quantpipe.formats.scheme import WeightScheme
from quantpipe.quantize.loop.block_solving import fake_quantize_input
from quantpipe.quantize.model.structure import UnrolledExperts
from quantpipe.quantize.solvers.scales import round_weight
from quantpipe.quantize.targets.allocate import LinearSet


@dataclass(frozen=True)
class Reading:
    """What a linear read: the tensor, and the mean of its squares in each column."""

    x: Tensor
    importance_K: Tensor


def named_linears(parent: nn.Module, path: str, names: Collection[str]) -> dict[str, nn.Linear]:
    """The linears below ``parent``, itself named ``path``, among ``names``; by their full names."""
    named = {".".join(filter(None, (path, leaf))): module for leaf, module in parent.named_modules()}
    return {name: m for name, m in named.items() if name in names and isinstance(m, nn.Linear)}


def expert_names(parent: nn.Module, path: str) -> set[str]:
    """The full names of everything inside the experts of mixtures below ``parent``, itself named ``path``."""
    stacks = [(name, module) for name, module in parent.named_modules() if isinstance(module, UnrolledExperts)]
    return {".".join((path, name, leaf)) for name, stack in stacks for leaf, _ in stack.named_modules()}


def sets_of(linears: Mapping[str, nn.Linear], seen: Mapping[str, Reading], experts: Collection[str]) -> list[list[str]]:
    """Names of linears that must share a scheme, in model order: readers of one tensor, and all ``experts``."""
    groups: dict[Any, list[str]] = {}
    for name in linears:
        key: Any = name
        if name in experts:
            key = "experts"
        elif name in seen:
            key = (seen[name].x.data_ptr(), seen[name].x.shape)
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def linear_set(
    members: Mapping[str, nn.Linear], schemes: Mapping[str, WeightScheme], dtypes: Mapping[str, torch.dtype]
) -> LinearSet:
    """The set that ``members`` are. DataError where they differ in scheme or dtype."""
    kinds = {(schemes[name], dtypes[name]) for name in members}
    if len(kinds) > 1:
        listed = ", ".join(f"{name} ({schemes[name].label}, {dtypes[name]})" for name in members)
        raise DataError(f"{listed}: runtimes execute these as one matrix, so they must share a scheme and a dtype")
    ((scheme, dtype),) = kinds
    return LinearSet({name: (m.out_features, m.in_features) for name, m in members.items()}, scheme, dtype)


@contextmanager
def reading(linears: Mapping[str, nn.Linear]) -> Iterator[dict[str, Reading]]:
    """Within it, what each linear reads is noted; several calls of one linear are averaged over their tokens."""
    seen: dict[str, Reading] = {}
    num_tokens = dict.fromkeys(linears, 0)

    def note(name: str, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x_TK = args[0].reshape(-1, args[0].shape[-1])
        if not len(x_TK):
            return
        mean_K = x_TK.square().mean(0)
        num_tokens[name] += len(x_TK)
        if name in seen:
            mean_K = seen[name].importance_K.lerp(mean_K, len(x_TK) / num_tokens[name])
        # Kept alive: only then do equal addresses mean the same tensor.
        seen[name] = Reading(args[0], mean_K)

    with ExitStack() as hooks:
        for name, linear in linears.items():
            hooks.enter_context(linear.register_forward_pre_hook(partial(note, name)))
        yield seen


def round_set(linears: Mapping[str, nn.Linear], rounded: LinearSet, seen: Mapping[str, Reading]) -> dict[str, Tensor]:
    """Each linear's weight as it comes back from storage; those that read nothing have no importance to go by."""
    weights: dict[str, Tensor] = {}
    for name, linear in linears.items():
        importance_K = seen[name].importance_K if name in seen else None
        solution = round_weight(linear.weight, rounded.scheme, rounded.scale_dtype, importance_K)
        quantized = QuantWeight(solution.q_NK, solution.scale_NG, rounded.scheme, solution.zero_NG)
        weights[name] = quantized.dequantized()
    return weights


@contextmanager
def computing_with(
    linears: Mapping[str, nn.Linear], weights: Mapping[str, Tensor], scheme: WeightScheme
) -> Iterator[None]:
    """Within it, ``linears`` have other ``weights``, and inputs rounded where ``scheme`` rounds those."""
    with ExitStack() as undo:
        for name, linear in linears.items():
            # A new parameter, not new values: a head may share the embedding's.
            undo.callback(setattr, linear, "weight", linear.weight)
            linear.weight = nn.Parameter(weights[name], requires_grad=False)
            if scheme.activation_bits is not None:
                undo.enter_context(linear.register_forward_pre_hook(fake_quantize_input))
        yield
