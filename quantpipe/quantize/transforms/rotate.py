"""The transform ``rotate``: the residual stream and the heads' values turned so that no channel stands out.

Both rotations are folded into weights: nothing is added at run time, and the model computes what it did. Every block is
proved: in float64, on random input, the rotated block must give the rotated output. Rotating everything outside the
blocks comes first, so what enters a block is rotated already.

Not to be stacked with awq, which makes room for the few channels that carry the largest activations: a rotation leaves
no such channels, and awq's scale for each channel would have to pass through a norm whose weight has been folded away.

Shapes: S sequences, L tokens, D hidden size.
Sources: Ashkboos et al. 2024, "QuaRot", section 4, stage 1 (R1); Liu et al. 2024, "SpinQuant", section 3.1 (R1, R2).
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quantpipe.errors import RecipeError
from quantpipe.quantize.model.block_runs import Batch, capture_block_inputs, run_block
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.transforms.hadamard import Rotation, RotationKind, make_rotation
from quantpipe.quantize.transforms.head_values import HeadValues, candidates
from quantpipe.quantize.transforms.rotate_outside import (
    PROBE_TOKENS,
    probe_ids,
    prove_outside,
    rotate_outside,
    users_outside,
)
from quantpipe.quantize.transforms.stream import (
    ADVICE,
    PROOF_TOLERANCE,
    StreamTrace,
    StreamUsers,
    fold_norms,
    rotate_users,
    users_of,
    watching,
    writers_reading_no_norm,
)
from quantpipe.quantize.transforms.transform import Transform, TransformInput, TransformRecord

# Added to the seed for the heads' rotations, so that they are drawn apart from the stream's.
HEAD_SEED_OFFSET = 1


class RotateSettings(Protocol):
    """The recipe's section of this transform."""

    @property
    def kind(self) -> RotationKind: ...

    @property
    def seed(self) -> int: ...


@dataclass(frozen=True)
class RotatedBlock:
    """What was rotated in a block. ``error`` is relative to what the block adds to the stream, of its worst token.

    ``values`` is None where no rotation of the heads' values left the output as it was.
    """

    users: StreamUsers
    error: float
    values: HeadValues | None


@dataclass(frozen=True)
class Rotations:
    """The rotation of the stream, and how to draw those of heads of any size."""

    stream: Rotation
    kind: RotationKind
    seed: int

    def of_heads(self, values: HeadValues) -> dict[int, Rotation]:
        """One rotation for each KV head, by the row its values start at; the same in every block."""
        generator = torch.Generator().manual_seed(self.seed + HEAD_SEED_OFFSET)
        return {start: make_rotation(values.size, self.kind, generator) for start in values.starts}


@torch.no_grad()
def make_rotate(settings: RotateSettings, model: StreamedModel) -> Transform:
    """Rotate everything outside the blocks of ``model``, and return the transform that rotates each block.

    Raises RecipeError as ``check_rotate`` does.
    """
    plan = _prove(settings, model)
    rotate_outside(model.module, plan.outside, plan.rotations.stream)
    return lambda given: _rotate_block(given, plan.probes, plan.rotations, plan.head_size)


def check_rotate(settings: RotateSettings, model: StreamedModel) -> None:
    """Rotate and prove copies of the first block of every kind; ``model`` is left as it is.

    Raises RecipeError, naming the module, where the model cannot be rotated.
    """
    _prove(settings, model)


@dataclass(frozen=True)
class _Plan:
    """What was proved, and how each block is rotated; ``probes`` by the block's name."""

    outside: StreamUsers
    rotations: Rotations
    probes: Mapping[str, Batch]
    head_size: int | None


@torch.no_grad()
def _prove(settings: RotateSettings, model: StreamedModel) -> _Plan:
    kwargs = capture_block_inputs(model, probe_ids(model).numpy(), None, ())
    names = [model.blocks.name(index) for index in range(len(model.blocks.blocks))]
    probes = {name: _probe(model, kwargs.of(0, index)) for index, name in enumerate(names)}
    kinds = _first_of_each_kind(model)
    found: list[StreamUsers] = []
    for index in kinds:
        block, probe = model.load_block(index).double(), probes[names[index]]
        found.append(_observed(block, probe, names[index]).users)
    output_kind = block(probe.hidden_SLD, **probe.kwargs)
    outside = users_outside(model, output_kind)
    fixes_ones = any(users.subtracts_mean for users in [*found, outside])
    generator = torch.Generator().manual_seed(settings.seed)
    stream = make_rotation(probe.hidden_SLD.shape[-1], settings.kind, generator, fixes_ones)
    rotations = Rotations(stream, settings.kind, settings.seed)
    prove_outside(model, outside, stream, output_kind)
    head_size: int | None = None
    for index in kinds:
        done = rotated(model.load_block(index).double(), probes[names[index]], rotations, None, names[index])
        head_size = done.values.size if done.values is not None else head_size
    return _Plan(outside, rotations, probes, head_size)


@torch.no_grad()
def rotated(block: nn.Module, probe: Batch, rotations: Rotations, head_size: int | None, where: str) -> RotatedBlock:
    """Rotate ``block`` (float64) in place and prove it on ``probe``, whose hidden states are not rotated.

    ``head_size`` is tried first for the heads' values; ``where`` names the block. RecipeError where no rotation of the
    stream passes through the block.
    """
    seen = _observed(block, probe, where)
    turned = Batch(rotations.stream.apply(probe.hidden_SLD), probe.kwargs)
    expected_LD = rotations.stream.apply(seen.added_LD)
    users, error = _rotate_stream(block, seen, turned, expected_LD, rotations.stream, where)
    for values in candidates(users, seen.trace, head_size):
        touched = [block.get_submodule(name) for name in (values.producer, values.consumer)]
        kept = [copy.deepcopy(module.state_dict()) for module in touched]
        values.rotate(block, rotations.of_heads(values))
        error_with_values = _error(_added(block, turned), expected_LD)
        if error_with_values <= PROOF_TOLERANCE:
            return RotatedBlock(users, error_with_values, values)
        for module, state in zip(touched, kept, strict=True):
            module.load_state_dict(state)
    return RotatedBlock(users, error, None)


def _rotate_stream(
    block: nn.Module, seen: "_Observed", turned: Batch, expected_LD: Tensor, stream: Rotation, where: str
) -> tuple[StreamUsers, float]:
    """Rotate the users of the stream, the likelier choice of writers first; returns those that proved true."""
    fold_norms(block, seen.users, where)
    errors = []
    choices = dict.fromkeys((seen.users, writers_reading_no_norm(seen.users, seen.trace)))
    kept = copy.deepcopy(block.state_dict()) if len(choices) > 1 else {}
    for users in choices:
        rotate_users(block, users, stream)
        errors.append(_error(_added(block, turned), expected_LD))
        if errors[-1] <= PROOF_TOLERANCE:
            return users, errors[-1]
        block.load_state_dict(kept, strict=False)
    raise RecipeError(f"quantize.transforms: rotate: {_refusal(seen, where, min(errors))}; {ADVICE}")


@dataclass(frozen=True)
class _Observed:
    """What a run of a block showed, and what the block added to the stream [L, D]."""

    users: StreamUsers
    trace: StreamTrace
    added_LD: Tensor


def _observed(block: nn.Module, probe: Batch, where: str) -> _Observed:
    names = [name for name, _ in block.named_modules() if name]
    with watching(block, names) as trace:
        added_LD = _added(block, probe)
    return _Observed(users_of(block, names, trace, probe.hidden_SLD[0], where), trace, added_LD)


def _added(block: nn.Module, probe: Batch) -> Tensor:
    """What the block adds to its input [L, D]: beside a large stream, a change of it would not be seen."""
    return (run_block(block, probe) - probe.hidden_SLD)[0]


def _error(found_LD: Tensor, expected_LD: Tensor) -> float:
    """The largest relative error of a token."""
    return float(((found_LD - expected_LD).norm(dim=-1) / expected_LD.norm(dim=-1)).max())


def _refusal(seen: _Observed, where: str, error: float) -> str:
    if seen.users.unread:
        return (
            f"{where}.{seen.users.unread[0]} scales channels on their way into the residual stream, which no rotation "
            "passes through"
        )
    return f"rotating the residual stream changes what {where} computes (by {error:.1%} of what it adds)"


def _first_of_each_kind(model: StreamedModel) -> list[int]:
    """The first block of every class and set of shapes."""
    kinds: dict[tuple[type, tuple[tuple[str, torch.Size], ...]], int] = {}
    for index, block in enumerate(model.blocks.blocks):
        shapes = tuple((name, parameter.shape) for name, parameter in block.named_parameters())
        kinds.setdefault((type(block), shapes), index)
    return list(kinds.values())


def _probe(model: StreamedModel, kwargs: Mapping[str, Any]) -> Batch:
    """Random hidden states, all channels alike, and what a block is called with: what holds, holds for any input."""
    size = model.module.config.get_text_config().hidden_size  # type: ignore[operator, union-attr]
    noise_SLD = torch.randn(1, PROBE_TOKENS, size, generator=torch.Generator().manual_seed(0))
    return Batch(noise_SLD, dict(kwargs)).first_sequence(torch.float64)


def _rotate_block(
    given: TransformInput, probes: Mapping[str, Batch], rotations: Rotations, head_size: int | None
) -> list[TransformRecord]:
    exact = copy.deepcopy(given.block).double()
    done = rotated(exact, probes[given.name], rotations, head_size, given.name)
    for name, parameter in given.block.named_parameters():
        turned = exact.get_parameter(name)
        stored = given.original.get_parameter(name).dtype
        is_target = name.removesuffix(".weight") in given.linears
        parameter.copy_(turned if is_target else turned.to(stored))
    return list(_records(done, rotations, given.linears))


def _records(done: RotatedBlock, rotations: Rotations, linears: Mapping[str, nn.Linear]) -> Iterator[TransformRecord]:
    """One record for each norm and what reads it, one for the heads' values, one for what else writes the stream."""
    stream = f"stream rotated ({rotations.stream.label}), output exact to {done.error:.0e}"
    for group in done.users.readers:
        names = tuple(name for name in group.names if name in linears)
        if names:
            yield TransformRecord(names, names[0] if group.norm is None else group.norm.name, None, detail=stream)
    writers = tuple(name for name in done.users.writers if name in linears)
    if done.values is not None:
        heads = f"values rotated ({rotations.kind}, {len(done.values.starts)} heads of {done.values.size}); {stream}"
        yield TransformRecord((done.values.consumer,), done.values.producer, None, detail=heads)
        writers = tuple(name for name in writers if name != done.values.consumer)
    if writers:
        yield TransformRecord(writers, writers[0], None, detail=stream)
    if done.values is None:
        reason = "only the stream is rotated: no rotation of heads' values leaves the output as it is"
        yield TransformRecord(writers, None, None, reason)
