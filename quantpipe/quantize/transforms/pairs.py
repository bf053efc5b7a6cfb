"""Which scales may move between a module and the linears that read what it gives out: observed, then proved.

Candidates are read off one run of the block (``pair_candidates``); a candidate is used only if random scales leave the
block's output unchanged in float64. No names of models or modules are known here.

Shapes: S sequences, L tokens per sequence, D hidden size.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from quantpipe.quantize.model.block_runs import Batch
from quantpipe.quantize.transforms.pair_candidates import (
    PROOF_TOLERANCE,
    Group,
    ScalePair,
    Trace,
    contribution,
    groups_of,
    linear_candidates,
    norm_candidates,
    random_scale,
    trace_block,
)

__all__ = ["ScalePair", "find_pairs", "probes"]

# Enough tokens to tell a true pair from a false one; float64 products over a whole sequence would cost seconds.
PROBE_TOKENS = 64
# Inputs drawn at random, tried in turn where the tokens of a sequence do not reach every expert.
RANDOM_PROBES = 4
MAX_CANDIDATES = 8

Missing = list[tuple[tuple[str, ...], str]]


@torch.no_grad()
def find_pairs(block: nn.Module, linears: Mapping[str, nn.Linear], batch: Batch) -> tuple[list[ScalePair], Missing]:
    """The proved pairs of ``block`` among its ``linears``, and the groups of linears without one, with the reason.

    ``linears`` are the targets, by their name in ``block``. The block is left as it was.
    """
    exact = copy.deepcopy(block).double()
    probe, trace, expected_LD = _probe(exact, linears, batch)
    reached = {name for name, _ in trace.reads}
    missing: Missing = [((name,), "no probe token reaches it") for name in linears if name not in reached]
    candidates: dict[Group, Iterator[ScalePair]] = {}
    for group in groups_of(trace, linears):
        unseen = _may_read_too(exact, group, reached)
        if unseen is not None:
            missing.append((group.targets, f"{unseen} may read {group.norm} too, but no probe token reaches it"))
        else:
            candidates[group] = _candidates(exact, group, trace)
    proved, refused = _prove_each(exact, probe, expected_LD, candidates)
    return proved, missing + refused


def _candidates(block: nn.Module, group: Group, trace: Trace) -> Iterator[ScalePair]:
    if group.norm is not None:
        return norm_candidates(block, group, trace)
    return islice(linear_candidates(group, trace), MAX_CANDIDATES)


def _may_read_too(block: nn.Module, group: Group, reached: set[str]) -> str | None:
    """A linear that the probe does not reach and that, being as wide, may read the group's norm as others do."""
    if group.norm is None:
        return None
    width = group.x_TK.shape[-1]
    unseen = (
        name
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and module.in_features == width and name not in reached
    )
    return next(unseen, None)


def _prove_each(
    block: nn.Module, probe: Batch, expected_LD: Tensor, candidates: Mapping[Group, Iterator[ScalePair]]
) -> tuple[list[ScalePair], Missing]:
    """Try the likeliest candidate of each group, then the next of those left, until none has another."""
    proved: dict[Group, ScalePair] = {}
    tried: dict[Group, list[str]] = {group: [] for group in candidates}
    while True:
        left = [group for group in candidates if group not in proved]
        drawn = {group: pair for group in left if (pair := next(candidates[group], None)) is not None}
        if not drawn:
            break
        for group, pair in drawn.items():
            tried[group].append(pair.producer)
        true = set(_true_ones(block, probe, expected_LD, list(drawn.values())))
        proved |= {group: pair for group, pair in drawn.items() if pair in true}
    missing = [(group.targets, _reason(group, tried[group])) for group in candidates if group not in proved]
    return [proved[group] for group in candidates if group in proved], missing


def _reason(group: Group, tried: Sequence[str]) -> str:
    if tried:
        return f"rescaling against {', '.join(dict.fromkeys(tried))} changes the block's output"
    if group.norm is not None:
        return f"what {group.norm} gives out does not follow its weight"
    return "what it reads is not the output of a norm or linear of the block"


def _true_ones(block: nn.Module, probe: Batch, expected_LD: Tensor, pairs: Sequence[ScalePair]) -> list[ScalePair]:
    """Those of ``pairs`` that leave the output unchanged. One run proves all where, as usual, none is false.

    Their scales are drawn independently of each other, so pairs that are true together are true one by one.
    """
    if _is_unchanged(block, probe, expected_LD, pairs):
        return list(pairs)
    if len(pairs) == 1:
        return []
    half = len(pairs) // 2
    return [pair for part in (pairs[:half], pairs[half:]) for pair in _true_ones(block, probe, expected_LD, part)]


def _is_unchanged(block: nn.Module, probe: Batch, expected_LD: Tensor, pairs: Sequence[ScalePair]) -> bool:
    """Whether random scales in ``pairs`` leave the block's output as it was. The block is put back afterwards."""
    generator = torch.Generator().manual_seed(0)
    scales = [random_scale(pair.num_channels, generator) for pair in pairs]
    for pair, scale_P in zip(pairs, scales, strict=True):
        pair.apply(block, scale_P)
    found_LD = contribution(block, probe)
    for pair, scale_P in zip(pairs, scales, strict=True):
        pair.apply(block, 1 / scale_P)
    error_L = (found_LD - expected_LD).norm(dim=-1)
    return bool((error_L <= PROOF_TOLERANCE * expected_LD.norm(dim=-1)).all())


def _probe(block: nn.Module, linears: Mapping[str, nn.Linear], batch: Batch) -> tuple[Batch, Trace, Tensor]:
    """Inputs for the proof, and the block's run on them: the first that reach every target, or else the most.

    Few tokens, then a whole sequence, then random tokens, as loud in each channel, which experts share out more evenly.
    A pair holds for any input or for none, so it does not matter what is fed in.
    """
    whole = batch.first_sequence(torch.float64)
    best: tuple[int, Batch, Trace, Tensor] | None = None
    for probe in probes(whole):
        try:
            trace, output_LD = trace_block(block, probe)
        except (RuntimeError, ValueError, IndexError):
            if probe is whole:
                raise
            continue  # arguments that cannot be cut short
        num_reached = len({name for name, _ in trace.reads} & linears.keys())
        if best is None or num_reached > best[0]:
            best = (num_reached, probe, trace, output_LD)
        if num_reached == len(linears):
            break
    assert best is not None  # the whole sequence runs, or raises
    return best[1:]


def probes(whole: Batch) -> Iterator[Batch]:
    """Inputs to try a proof on, from a sequence in float64: its first tokens, the whole, then random ones."""
    length = whole.hidden_SLD.shape[1]
    if length > PROBE_TOKENS:
        yield Batch(whole.hidden_SLD[:, :PROBE_TOKENS], _cut(whole.kwargs, length))
    yield whole
    generator = torch.Generator().manual_seed(0)
    loudness_D = whole.hidden_SLD.square().mean((0, 1)).sqrt()
    for _ in range(RANDOM_PROBES):
        noise_SLD = torch.randn(whole.hidden_SLD.shape, generator=generator, dtype=torch.float64)
        yield Batch(noise_SLD * loudness_D, whole.kwargs)


def _cut(value: Any, length: int) -> Any:
    """Arguments of a block for the first ``PROBE_TOKENS`` tokens: every dimension of size ``length`` cut to that."""
    if isinstance(value, dict):
        return {key: _cut(part, length) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_cut(part, length) for part in value)
    if isinstance(value, Tensor):
        for dim, size in enumerate(value.shape):
            value = value.narrow(dim, 0, PROBE_TOKENS) if size == length else value
    return value
