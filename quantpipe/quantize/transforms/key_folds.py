"""Where a block makes its queries and keys, and which of their channels rope turns together: seen, then proved.

A fold divides channels of a KV head's keys by a scale and multiplies those of the query heads that read it, so that
attention scores stay as they are. Rope allows it where both channels that it turns together share their scale. No names
of models or modules are known here.

Shapes: L tokens, H query heads, J KV heads, D head size, N output channels of a module.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantpipe.quantize.model.block_runs import Batch
from quantpipe.quantize.model.watched_attention import AttentionCall, watching_attention
from quantpipe.quantize.transforms.pair_candidates import (
    PROOF_TOLERANCE,
    Trace,
    contribution,
    copies,
    random_scale,
    trace_block,
)
from quantpipe.quantize.transforms.pairs import probes

UNSEEN = "its attention does not go through transformers' attention interface"


@dataclass(frozen=True, eq=False)
class KeyFold:
    """The modules (one where they are fused) whose output channels ``query_rows_HD`` and ``key_rows_JD`` become, after
    rope, the channels of queries and keys; heads that share a norm share its channels.

    ``partner_D`` is the channel that rope turns with each one, or itself.
    """

    query: str
    key: str
    query_rows_HD: Tensor
    key_rows_JD: Tensor
    partner_D: Tensor

    @property
    def is_shared(self) -> bool:
        """Whether all heads take the same scale."""
        return any(len(rows) > 1 and torch.equal(rows[0], rows[1]) for rows in (self.query_rows_HD, self.key_rows_JD))

    def for_queries(self, scale_JD: Tensor) -> Tensor:
        """The scale [H, D] of the KV head that each query head reads."""
        return scale_JD.repeat_interleave(len(self.query_rows_HD) // len(self.key_rows_JD), dim=0)

    def shared(self, value_JD: Tensor) -> Tensor:
        """The larger value of every two channels that must share one."""
        value_JD = torch.maximum(value_JD, value_JD[:, self.partner_D])
        return value_JD.amax(0, keepdim=True).expand_as(value_JD) if self.is_shared else value_JD

    def factors(self, scale_JD: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Of each module: its name, the output channels [heads, D] that change, and what they are multiplied by."""
        yield self.key, self.key_rows_JD, 1 / scale_JD
        yield self.query, self.query_rows_HD, self.for_queries(scale_JD)

    @torch.no_grad()
    def apply(self, block: nn.Module, scale_JD: Tensor) -> None:
        """Divide keys by ``scale_JD`` and multiply queries by it, in place."""
        for name, rows, factor in self.factors(scale_JD):
            for parameter in block.get_submodule(name).parameters(recurse=False):
                factor_N = torch.ones(len(parameter), dtype=parameter.dtype)
                factor_N[rows] = factor.to(parameter.dtype)
                parameter.mul_(factor_N.view(-1, *[1] * (parameter.ndim - 1)))


@dataclass(frozen=True)
class NoKeyFold:
    """Why a block has none, and the modules it was tried on."""

    reason: str
    modules: tuple[str, ...] = ()


@torch.no_grad()
def find_key_fold(block: nn.Module, batch: Batch) -> KeyFold | NoKeyFold:
    """The proved fold of ``block``. The block is left as it was."""
    exact = copy.deepcopy(block).double()
    for probe in probes(batch.first_sequence(torch.float64)):
        try:
            trace, expected_LD, call = _run(exact, probe)
            break
        except (RuntimeError, ValueError, IndexError):
            continue  # arguments that cannot be cut short
    else:
        return NoKeyFold("the block cannot be run by itself")
    if call is None:
        return NoKeyFold(UNSEEN)
    key, query = (_maker(exact, trace, call.key_SJLD[0]), _maker(exact, trace, call.query_SHLD[0]))
    if key is None or query is None:
        what = "queries" if key else "keys"
        return NoKeyFold(f"its {what} are not what one of its linears or norms gives out, turned by rope")
    partner_D = _partners(call.key_SJLD[0], key.output_hLD)
    if partner_D is None:
        return NoKeyFold(f"what rope does to the output of {key.name} is not known", (query.name, key.name))
    fold = KeyFold(query.name, key.name, query.rows_hD, key.rows_hD, partner_D)
    if not _is_true(exact, fold, probe, expected_LD, call):
        reason = f"rescaling {fold.key} against {fold.query} changes the block's output"
        return NoKeyFold(reason, (query.name, key.name))
    return fold


def _run(block: nn.Module, probe: Batch) -> tuple[Trace, Tensor, AttentionCall | None]:
    calls: list[AttentionCall] = []
    with watching_attention(calls.append):
        trace, output_LD = trace_block(block, probe)
    return trace, output_LD, calls[0] if len(calls) == 1 else None


def _is_true(block: nn.Module, fold: KeyFold, probe: Batch, expected_LD: Tensor, call: AttentionCall) -> bool:
    """Whether a random scale changes keys and queries as it should and the block's output not at all."""
    shape = fold.key_rows_JD.shape
    scale_JD = fold.shared(random_scale(fold.key_rows_JD.numel(), torch.Generator().manual_seed(0)).view(shape))
    fold.apply(block, scale_JD)
    calls: list[AttentionCall] = []
    with watching_attention(calls.append):
        found_LD = contribution(block, probe)
    fold.apply(block, 1 / scale_JD)
    pairs = [
        (found_LD, expected_LD),
        (calls[0].key_SJLD[0] * scale_JD.unsqueeze(1), call.key_SJLD[0]),
        (calls[0].query_SHLD[0] / fold.for_queries(scale_JD).unsqueeze(1), call.query_SHLD[0]),
    ]
    return all(
        bool(((found - expected).norm(dim=-1) <= PROOF_TOLERANCE * expected.norm(dim=-1)).all())
        for found, expected in pairs
    )


@dataclass(frozen=True, eq=False)
class _Maker:
    """A module whose output, before rope, are some heads: [h, L, D], from its output channels [h, D]."""

    name: str
    rows_hD: Tensor
    output_hLD: Tensor


def _maker(block: nn.Module, trace: Trace, heads_hLD: Tensor) -> _Maker | None:
    """The module that gave out what rope turned into ``heads_hLD``: rope leaves the first token as it is."""
    num_heads, length, head_dim = heads_hLD.shape
    first_hD = heads_hLD[:, 0]
    outputs = [(name, output) for name, _, output in trace.norms] + trace.gives
    for name, output in reversed(outputs):
        if output.shape == (num_heads * length, head_dim):  # a norm of each head, heads or tokens first
            for output_hLD in (output.view(num_heads, length, -1), output.view(length, num_heads, -1).transpose(0, 1)):
                if _is_same(output_hLD[:, 0], first_hD):
                    return _Maker(name, torch.arange(head_dim).expand(num_heads, -1), output_hLD)
        if len(output) != length or output.shape[1] < first_hD.numel():
            continue
        rows = copies(first_hD.flatten(), output[0])
        if rows is not None and len(set(rows.tolist())) == len(rows):
            rows_hD = rows.view(num_heads, head_dim)
            return _Maker(name, rows_hD, output[:, rows_hD].permute(1, 0, 2))
    return None


def _is_same(found: Tensor, expected: Tensor) -> bool:
    return bool(((found - expected).abs() <= PROOF_TOLERANCE * expected.abs().max()).all())


def _partners(after_hLD: Tensor, before_hLD: Tensor) -> Tensor | None:
    """Which channel each one is turned with [D]: together they keep their length, whatever the angle.

    The most channels that may be paired in a known layout are: some turn so slowly that they seem not to turn at all
    within few tokens, and sharing a scale is never wrong.
    """
    head_dim = after_hLD.shape[-1]
    gained_TD = (after_hLD.square() - before_hLD.square()).reshape(-1, head_dim)
    bound = PROOF_TOLERANCE * float(before_hLD.square().amax())
    if torch.equal(after_hLD, before_hLD):
        return torch.arange(head_dim)
    for num_turned in range(head_dim - head_dim % 2, 1, -2):
        for layout in _LAYOUTS:
            partner_D = torch.arange(head_dim)
            partner_D[:num_turned] = layout(num_turned)
            kept_TD = gained_TD + torch.where(partner_D == torch.arange(head_dim), 0.0, gained_TD[:, partner_D])
            if bool((kept_TD.abs() <= bound).all()):
                return partner_D
    return None


def _halves(num_turned: int) -> Tensor:
    return torch.arange(num_turned).roll(num_turned // 2)


def _neighbours(num_turned: int) -> Tensor:
    return torch.arange(num_turned) ^ 1


_LAYOUTS: tuple[Callable[[int], Tensor], ...] = (_halves, _neighbours)
