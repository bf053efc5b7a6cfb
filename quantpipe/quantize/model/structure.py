"""Models rewritten so that every weight to quantize is the weight of a Linear, and where each of them is stored.

transformers stacks the experts of a mixture in 3-D parameters, though checkpoints hold them one by one: ``unroll``
takes them apart. Experts that it does not know stay as they are, and are refused where targets are chosen.

Shapes: T tokens, k experts per token, D hidden size, F expert width.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from quantpipe.formats.artifact import Artifact

T = TypeVar("T")

STACKED_PARAMETERS = {"gate_up_proj", "down_proj"}
# Sums of a few products in another order.
PROOF_TOLERANCE = 1e-12


class Expert(nn.Module):
    """One expert of a mixture: down(act(gate(x)) * up(x))."""

    def __init__(
        self, hidden_size: int, width: int, act_fn: nn.Module, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False, dtype=dtype, device=device)
        self.gate_proj = linear(hidden_size, width)
        self.up_proj = linear(hidden_size, width)
        self.down_proj = linear(width, hidden_size)
        self.act_fn = act_fn

    def forward(self, x_TD: Tensor) -> Tensor:
        gated_TF = self.act_fn(self.gate_proj(x_TD)) * self.up_proj(x_TD)
        output_TD: Tensor = self.down_proj(gated_TF)
        return output_TD


class UnrolledExperts(nn.Module):
    """Experts as modules of their own, called in order of their number, each on the tokens routed to it.

    An expert that no token is routed to is not called.
    """

    def __init__(self, stacked: nn.Module) -> None:
        super().__init__()
        gate_up, down = stacked.get_parameter("gate_up_proj"), stacked.get_parameter("down_proj")
        self.num_experts, hidden_size, width = down.shape
        for number in range(self.num_experts):
            expert = Expert(hidden_size, width, stacked.get_submodule("act_fn"), down.dtype, down.device)
            if not down.is_meta:
                expert.gate_proj.weight.data, expert.up_proj.weight.data = gate_up.data[number].chunk(2)
                expert.down_proj.weight.data = down.data[number]
            self.add_module(str(number), expert.requires_grad_(down.requires_grad))

    def forward(self, hidden_TD: Tensor, expert_Tk: Tensor, share_Tk: Tensor) -> Tensor:
        output_TD = torch.zeros_like(hidden_TD)
        for number in range(self.num_experts):
            token, slot = torch.where(expert_Tk == number)
            if len(token):
                given_TD = self.get_submodule(str(number))(hidden_TD[token]) * share_Tk[token, slot, None]
                output_TD.index_add_(0, token, given_TD.to(output_TD.dtype))
        return output_TD


def unroll(module: nn.Module) -> None:
    """Replace stacked experts inside ``module`` by one module per expert, in place, its function unchanged.

    On the meta device nothing is allocated. Experts that compute anything else (biases, other gates) stay stacked.
    """
    for name, stacked in list(module.named_modules()):
        if _is_stack_of_experts(stacked):
            module.set_submodule(name, UnrolledExperts(stacked))


def expert_linears(model: nn.Module) -> list[str]:
    """The names of the Linears of all unrolled experts in ``model``, or in one of its blocks."""
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, UnrolledExperts))
    return [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name.startswith(prefixes)]


def _is_stack_of_experts(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    if parameters.keys() != STACKED_PARAMETERS or "act_fn" not in dict(module.named_children()):
        return False
    gate_up, down = parameters["gate_up_proj"], parameters["down_proj"]
    if gate_up.ndim != 3 or down.ndim != 3 or gate_up.shape != (len(down), 2 * down.shape[2], down.shape[1]):
        return False
    return _computes_as_unrolled(module, len(down))


@torch.no_grad()
def _computes_as_unrolled(module: nn.Module, num_experts: int) -> bool:
    """Whether the experts, with small random weights in place of their own, give what they give when unrolled."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    small = copy.copy(module)
    width, hidden_size, num_tokens = 3, 5, 7
    weights = {
        "gate_up_proj": draw(num_experts, 2 * width, hidden_size),
        "down_proj": draw(num_experts, hidden_size, width),
    }
    vars(small)["_parameters"] = {name: nn.Parameter(weight) for name, weight in weights.items()}
    if "config" in vars(small):
        small.config = copy.copy(small.config)
        # the fast implementations have no float64
        small.config._experts_implementation = "eager"  # type: ignore[union-attr]  # a configuration, not a module
    num_chosen = min(2, num_experts)
    chosen_Tk = torch.stack([torch.randperm(num_experts, generator=generator)[:num_chosen] for _ in range(num_tokens)])
    given = (draw(num_tokens, hidden_size), chosen_Tk, draw(num_tokens, num_chosen))
    try:
        expected_TD = small(*given)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return False
    return torch.allclose(UnrolledExperts(small)(*given), expected_TD, rtol=PROOF_TOLERANCE, atol=PROOF_TOLERANCE)


@dataclass(frozen=True, eq=False)
class Renamed(Mapping[str, T]):
    """``values`` under other names; ``own`` tells which of theirs each stands for."""

    values_of: Mapping[str, T]
    own: Mapping[str, str]

    def __getitem__(self, name: str) -> T:
        return self.values_of[self.own[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)


@dataclass(frozen=True)
class StoredNames:
    """The name in the checkpoint of each parameter of an unrolled model; those that are stored nowhere are left out."""

    of: Mapping[str, str]

    def tensor(self, name: str) -> str:
        return self.of.get(name, name)

    def module(self, name: str) -> str:
        """The name under which a module's weight is stored."""
        return self.tensor(f"{name}.weight").removesuffix(".weight")

    def of_modules(self, values: Mapping[str, T]) -> Mapping[str, T]:
        """``values`` by module, under the modules' names in the checkpoint; nothing is read of them yet."""
        return Renamed(values, {self.module(name): name for name in values})

    def of_tensors(self, values: Mapping[str, T]) -> Mapping[str, T]:
        """``values`` by parameter, under the parameters' names in the checkpoint; nothing is read of them yet."""
        return Renamed(values, {self.tensor(name): name for name in values})

    def both(self, modules: Iterable[str]) -> list[str]:
        """The names that modules have in the checkpoint, and those they have in transformers where these differ.

        vLLM looks up what config.json says of a module by the former, transformers by the latter.
        """
        return list(dict.fromkeys(name for module in modules for name in (self.module(module), module)))

    def declared(self, values: Mapping[str, T]) -> dict[str, T]:
        """``values`` by module, under ``both`` names."""
        return {name: value for module, value in values.items() for name in self.both([module])}

    def seen_through(self, base: Artifact) -> Artifact:
        """``base`` under the names that parameters have in the model."""
        return replace(base, stored={name: base.stored[kept] for name, kept in self.of.items()})


def stored_names(model: nn.Module, base: Artifact) -> StoredNames:
    """Find each parameter and buffer of an unrolled transformers model in ``base``.

    Most are stored under their own name; others under the name that transformers would save them by; and where only the
    model's body was saved, without its prefix.
    """
    own = list(model.state_dict())
    named = {name: name for name in own if name in base.stored}
    if len(named) < len(own):
        named |= {name: saved for name, saved in _names_when_saved(model).items() if saved in base.stored}
        prefix = f"{model.base_model_prefix}."
        bare = {name: name.removeprefix(prefix) for name in own if name not in named and name.startswith(prefix)}
        named |= {name: short for name, short in bare.items() if short in base.stored}
    return StoredNames(named)


def _names_when_saved(model: nn.Module) -> dict[str, str]:
    """Parameter -> the tensor that transformers writes it to, seen by having it convert tensors that hold a number."""
    from transformers.core_model_loading import revert_weight_conversion

    probes: dict[str, Tensor] = {}
    parts: list[tuple[str, torch.Size]] = []  # what the number stands for, and the shape it fills

    def probe(leading: tuple[int, ...], names: list[str], part: torch.Size) -> Tensor:
        numbers = torch.arange(len(parts), len(parts) + len(names)).reshape(*leading, *[1] * len(part))
        parts.extend((name, part) for name in names)
        return numbers.expand(*leading, *part).clone()

    stacks = {name: module for name, module in model.named_modules() if isinstance(module, UnrolledExperts)}
    for name, parameter in model.state_dict().items():
        if not name.startswith(tuple(f"{stack}." for stack in stacks)):
            # two of everything: what is going to be cut in pieces shows
            probes[name] = probe((), [name], torch.Size(min(size, 2) for size in parameter.shape))
    for stack, module in stacks.items():
        experts = [f"{stack}.{number}" for number in range(module.num_experts)]
        gate_up = [f"{expert}.{leaf}.weight" for expert in experts for leaf in ("gate_proj", "up_proj")]
        down = [f"{expert}.down_proj.weight" for expert in experts]
        probes[f"{stack}.gate_up_proj"] = probe((len(experts), 2), gate_up, torch.Size([1])).reshape(-1, 2, 1)
        probes[f"{stack}.down_proj"] = probe((len(experts),), down, torch.Size([1, 1]))
    try:
        saved = revert_weight_conversion(model, probes)
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError):
        return {}  # a conversion that computes with its tensors; what it makes cannot be found by name
    found: dict[str, str] = {}
    for saved_name, tensor in saved.items():
        name, part = parts[int(tensor.flatten()[0])]
        if tensor.numel() == part.numel() and bool((tensor == tensor.flatten()[0]).all()):
            found[name] = saved_name
    return found
