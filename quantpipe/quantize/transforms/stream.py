"""Who reads the residual stream and who adds to it, observed on one run; and how to rotate all of them.

A reader is a matrix that reads the output of a norm of the stream (or the stream itself); a writer is one whose output
is as wide as the stream and that reads something else; an embedding before the first block writes too. What is observed
is a guess until a run on rotated input gives rotated output. No names of models or modules are known here.

Shapes: L tokens, T rows that a module sees, D hidden size, N out_features.
Source: Ashkboos et al. 2024, "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", section 4, stage 1.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantpipe.errors import RecipeError
from quantpipe.quantize.transforms.hadamard import Rotation

# Some norms compute in float32 whatever they are given, so what is true is not exact in float64.
PROOF_TOLERANCE = 1e-5
# A norm multiplies by its weight, or by one plus its weight.
NORM_OFFSETS = (0.0, 1.0)
ADVICE = "remove transform 'rotate'"
_MATRICES = nn.Linear | nn.Embedding


@dataclass
class StreamTrace:
    """What one run showed, in order. Every tensor is kept alive, so equal addresses mean the same tensor.

    ``reads`` and ``gives``: inputs and outputs, as rows, of modules with a 2-D weight; ``norms``: inputs and outputs of
    modules with a 1-D weight; ``embeddings``: those that were looked up.
    """

    reads: list[tuple[str, Tensor]] = field(default_factory=list)
    gives: list[tuple[str, Tensor]] = field(default_factory=list)
    norms: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    embeddings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Norm:
    """A norm of the stream: what it adds to its weight, and whether it subtracts the mean of the channels."""

    name: str
    offset: float
    is_centred: bool


@dataclass(frozen=True)
class Readers:
    """Matrices that read the output of one norm, or the stream itself (``norm`` None)."""

    norm: Norm | None
    names: tuple[str, ...]


@dataclass(frozen=True)
class StreamUsers:
    """Everything that a rotation of the stream has to change; ``unread``: norms as wide that no matrix reads."""

    readers: tuple[Readers, ...]
    writers: tuple[str, ...]
    unread: tuple[str, ...] = ()

    @property
    def subtracts_mean(self) -> bool:
        return any(group.norm is not None and group.norm.is_centred for group in self.readers)


@contextmanager
def watching(module: nn.Module, names: Iterable[str]) -> Iterator[StreamTrace]:
    """A context in which runs of ``module`` are noted for its submodules ``names``."""
    trace = StreamTrace()
    hooks = []
    for name in names:
        part = module.get_submodule(name)
        weight = dict(part.named_parameters(recurse=False)).get("weight")
        if isinstance(part, nn.Embedding) or (weight is not None and weight.ndim <= 2):
            hooks.append(part.register_forward_hook(_noting(trace, name)))
    try:
        yield trace
    finally:
        for hook in hooks:
            hook.remove()


def _noting(trace: StreamTrace, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        weight = module.get_parameter("weight")
        if isinstance(module, nn.Embedding):
            trace.embeddings.append(name)
        elif args and isinstance(args[0], Tensor) and args[0].shape[-1] == weight.shape[-1] and args[0].numel():
            x = args[0].reshape(-1, args[0].shape[-1])
            if weight.ndim == 2:
                trace.reads.append((name, x))
            if isinstance(output, Tensor):
                y = output.reshape(-1, output.shape[-1])
                (trace.gives.append((name, y)) if weight.ndim == 2 else trace.norms.append((name, x, y)))

    return note


def users_of(
    module: nn.Module, names: Iterable[str], trace: StreamTrace, entered_LD: Tensor, where: str
) -> StreamUsers:
    """The readers and writers among ``names`` of a stream that entered as ``entered_LD``.

    ``where`` is what ``module`` is called in errors. Raises RecipeError naming a matrix that the run did not reach and
    that has no counterpart that it did, and a norm that does not follow its weight.
    """
    width = entered_LD.shape[-1]
    wide_norms = [each for each in trace.norms if each[2].shape[-1] == width]
    members: dict[str, dict[str, None]] = {name: {} for name in ("", *(name for name, _, _ in wide_norms))}
    for name, x_TD in trace.reads:
        source = _source_of(x_TD, entered_LD, wide_norms)
        if source is not None:
            members[source][name] = None
    all_readers = {name for group in members.values() for name in group}
    writers = [name for name, y_TN in trace.gives if y_TN.shape[-1] == width and name not in all_readers]
    roles = {name: norm for norm, group in members.items() for name in group} | dict.fromkeys(writers)
    for name, norm in _unreached(module, names, trace, roles, where).items():
        writers.append(name) if norm is None else members[norm].setdefault(name)
    embeddings = [name for name in trace.embeddings if module.get_parameter(f"{name}.weight").shape[1] == width]
    given = {y_TN.data_ptr() for name, y_TN in trace.gives if name in all_readers}
    unread = [name for name, x_TD, _ in wide_norms if not members[name] and x_TD.data_ptr() not in given]
    readers = [Readers(None, tuple(members[""]))] if members[""] else []
    readers += [Readers(_norm(module, each, where), tuple(members[each[0]])) for each in wide_norms if members[each[0]]]
    return StreamUsers(tuple(readers), tuple(dict.fromkeys([*embeddings, *writers])), tuple(unread))


def writers_reading_no_norm(users: StreamUsers, trace: StreamTrace) -> StreamUsers:
    """``users`` without writers that read a norm off the stream, as the second of two low-rank factors may."""
    outputs = {y_TN.data_ptr() for _, _, y_TN in trace.norms}
    behind_norm = {name for name, x_TK in trace.reads if x_TK.data_ptr() in outputs}
    return replace(users, writers=tuple(name for name in users.writers if name not in behind_norm))


def _source_of(x_TD: Tensor, entered_LD: Tensor, norms: Iterable[tuple[str, Tensor, Tensor]]) -> str | None:
    """The norm whose output is read, whole or (by an expert) in part; "" for the stream as it entered; else None."""
    if x_TD.shape[-1] != entered_LD.shape[-1]:
        return None
    if x_TD.data_ptr() == entered_LD.data_ptr():
        return ""
    for name, _, y_LD in norms:
        if y_LD.data_ptr() == x_TD.data_ptr():
            return name
        if all(bool((y_LD == row_D).all(-1).any()) for row_D in (x_TD[0], x_TD[-1])):
            return name
    return None


def _unreached(
    module: nn.Module, names: Iterable[str], trace: StreamTrace, roles: Mapping[str, str | None], where: str
) -> dict[str, str | None]:
    """The norm read by each matrix that the run did not reach (None: it writes), as by its counterparts that it did.

    A counterpart has the same shape and is named alike but for one number, as experts are. Experts that no token of the
    run was routed to are such matrices.
    """
    reached = {name for name, _ in trace.reads} | set(trace.embeddings)
    shapes = {name: part.weight.shape for name in names if isinstance(part := module.get_submodule(name), _MATRICES)}
    found: dict[str, str | None] = {}
    for name in shapes.keys() - reached:
        alike = [other for other in reached & shapes.keys() if shapes[other] == shapes[name] and _differ(name, other)]
        played = {(other in roles, roles.get(other)) for other in alike}
        if len(played) != 1:
            raise RecipeError(
                f"quantize.transforms: rotate: no probe token reaches {_full_name(where, name)}; {ADVICE}"
            )
        has_role, norm = played.pop()
        if has_role:
            found[name] = norm
    return {name: found[name] for name in shapes if name in found}


def _full_name(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _differ(name: str, other: str) -> bool:
    """Whether two names differ in one number and nothing else."""
    parts, others = name.split("."), other.split(".")
    different = [pair for pair in zip(parts, others, strict=False) if pair[0] != pair[1]]
    return len(parts) == len(others) and len(different) == 1 and all(part.isdigit() for part in different[0])


def _norm(module: nn.Module, seen: tuple[str, Tensor, Tensor], where: str) -> Norm:
    """What is added to the weight of a norm, seen by giving it weights that multiply by one."""
    name, x_TD, y_TD = seen
    norm = module.get_submodule(name)
    kept = {leaf: parameter.clone() for leaf, parameter in norm.named_parameters(recurse=False)}
    bias = kept.get("bias", torch.zeros(()))
    try:
        for offset in NORM_OFFSETS:
            _put_unit(norm, offset)
            plain_TD = norm(x_TD)
            expected_TD = plain_TD * (kept["weight"] + offset) + bias
            if bool((expected_TD - y_TD).norm() <= PROOF_TOLERANCE * y_TD.norm()):
                raised_TD = norm(x_TD + x_TD.abs().max())
                is_centred = bool((raised_TD - plain_TD).norm() <= PROOF_TOLERANCE * plain_TD.norm())
                return Norm(name, offset, is_centred)
    finally:
        for leaf, parameter in norm.named_parameters(recurse=False):
            parameter.copy_(kept[leaf])
    raise RecipeError(
        f"quantize.transforms: rotate: what {_full_name(where, name)} gives out does not follow its weight; {ADVICE}"
    )


def _put_unit(norm: nn.Module, offset: float) -> None:
    for leaf, parameter in norm.named_parameters(recurse=False):
        parameter.fill_(1.0 - offset if leaf == "weight" else 0.0)


def fold_norms(module: nn.Module, users: StreamUsers, where: str) -> None:
    """Move the weights of the stream's norms into what reads them; the function is unchanged.

    A bias moves into the biases of the readers; where one of them has none, it stays, divided by the norm's weight.
    RecipeError, with ``where`` before the norm's name, where that weight is zero.
    """
    for group in users.readers:
        if group.norm is not None:
            _fold(module, group.norm, [module.get_submodule(name) for name in group.names], where)


def _fold(module: nn.Module, form: Norm, readers: list[nn.Module], where: str) -> None:
    norm = module.get_submodule(form.name)
    parameters = dict(norm.named_parameters(recurse=False))
    gain_D = parameters["weight"].double() + form.offset
    bias_D = parameters["bias"].double().clone() if "bias" in parameters else torch.zeros_like(gain_D)
    _put_unit(norm, form.offset)
    biases = [dict(reader.named_parameters(recurse=False)).get("bias") for reader in readers]
    if bool(bias_D.any()) and any(bias is None for bias in biases):
        if bool(((gain_D == 0) & (bias_D != 0)).any()):
            raise RecipeError(
                f"quantize.transforms: rotate: {_full_name(where, form.name)} has a bias where its weight is 0, and "
                f"what reads it has no bias to take that; {ADVICE}"
            )
        parameters["bias"].copy_(torch.where(bias_D == 0, 0.0, bias_D / gain_D))
        bias_D = torch.zeros_like(bias_D)
    for reader, bias in zip(readers, biases, strict=True):
        weight_ND = reader.get_parameter("weight")
        if bias is not None:
            bias.add_((weight_ND.double() @ bias_D).to(bias.dtype))
        weight_ND.mul_(gain_D.to(weight_ND.dtype))


def rotate_users(module: nn.Module, users: StreamUsers, rotation: Rotation) -> None:
    """W <- W R for readers, W <- R^T W and b <- b R for writers, in place; norms must be folded before."""
    for group in users.readers:
        for name in group.names:
            rotation.rotate_rows_(module.get_parameter(f"{name}.weight"))
        bias = None if group.norm is None else _bias(module.get_submodule(group.norm.name))
        if bias is not None:
            rotation.rotate_rows_(bias.unsqueeze(0))
    for name in users.writers:
        writer = module.get_submodule(name)
        weight = writer.get_parameter("weight")
        rotation.rotate_rows_(weight if isinstance(writer, nn.Embedding) else weight.T)
        bias = _bias(writer)
        if bias is not None:
            rotation.rotate_rows_(bias.unsqueeze(0))


def _bias(module: nn.Module) -> Tensor | None:
    return dict(module.named_parameters(recurse=False)).get("bias")
