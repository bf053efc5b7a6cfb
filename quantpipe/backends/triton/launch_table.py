"""How kernels are launched on each architecture: tile sizes, warps, pipeline stages. Plain data, chosen by shape.

Nothing is tuned at run time. The tests compile every entry for its architecture; none has been timed on a GPU yet.

Shapes: T rows, N out_features, K in_features.
"""

from dataclasses import dataclass

import torch

ARCHITECTURES = (80, 86, 89, 90, 100)
# Compute capabilities whose programs have no more shared memory than those of 89: their entries serve them.
_LIKE_89 = (11, 12)
# Streaming multiprocessors of the largest common chip of each architecture: how many programs fill it.
NUM_PROCESSORS = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148}


def architecture(device: torch.device) -> int:
    """The architecture whose entries a device takes. The interpreter, which runs on the CPU, takes those of 80."""
    if device.type != "cuda":
        return ARCHITECTURES[0]
    major, minor = torch.cuda.get_device_capability(device)
    if major in _LIKE_89:
        return 89
    return max((known for known in ARCHITECTURES if known <= 10 * major + minor), default=ARCHITECTURES[0])


@dataclass(frozen=True)
class RowsLaunch:
    """Kernels that work along whole rows: so many rows, and so many columns of them at a time."""

    block_rows: int
    block_size: int
    num_warps: int


_ELEMENTS_PER_PROGRAM = 2048
_MAX_WARPS = 16


def rows_launch(size: int, max_block_size: int) -> RowsLaunch:
    """For rows of ``size`` elements, of which one program holds up to ``max_block_size``; alike on every GPU."""
    block_size = min(1 << (size - 1).bit_length(), max_block_size)
    block_rows = max(1, _ELEMENTS_PER_PROGRAM // block_size)
    return RowsLaunch(block_rows, block_size, min(_MAX_WARPS, max(4, block_size // 512)))


@dataclass(frozen=True)
class MatmulLaunch:
    """Matrix products: a tile is ``block_rows`` x ``block_out``; ``block_in`` of K are multiplied at a time.

    ``swapped`` multiplies weight @ x.T, so that the weights are the left operand, which may come from registers.
    Where there are fewer tiles than ``programs_per_processor`` for each multiprocessor, K is split.
    """

    block_rows: int
    block_out: int
    block_in: int
    num_warps: int
    num_stages: int
    swapped: bool
    programs_per_processor: int = 1


# Of each architecture, by ascending number of rows: up to so many rows, and the launch. The last holds for any number.
Entries = tuple[tuple[int, MatmulLaunch], ...]
_ANY = 1 << 62


# With the weights as the left operand, 16 columns at a time are expanded in the registers that the tensor cores of
# sm_80 to sm_90 read. Those of sm_100 read a memory of their own, in which each product takes up room: there as many
# columns as share a scale are multiplied at once.
def _weight_only(block_in: int, many_rows: MatmulLaunch) -> Entries:
    return (
        (16, MatmulLaunch(16, 64, block_in, 4, 4, True, 2)),
        (32, MatmulLaunch(32, 64, block_in, 4, 4, True, 2)),
        (64, MatmulLaunch(64, 64, block_in, 4, 3, True, 2)),
        (_ANY, many_rows),
    )


WEIGHT_ONLY: dict[int, Entries] = {
    80: _weight_only(16, MatmulLaunch(128, 128, 16, 8, 3, True)),
    86: _weight_only(16, MatmulLaunch(128, 128, 16, 8, 3, True)),
    89: _weight_only(16, MatmulLaunch(128, 128, 16, 8, 3, True)),
    90: _weight_only(16, MatmulLaunch(128, 128, 16, 8, 3, True)),
    100: _weight_only(128, MatmulLaunch(64, 128, 128, 8, 3, True)),
}

_FEW_INT8: Entries = (
    (16, MatmulLaunch(16, 64, 128, 4, 4, True, 2)),
    (32, MatmulLaunch(32, 64, 128, 4, 4, True, 2)),
    (64, MatmulLaunch(64, 64, 128, 4, 4, False, 2)),
)
INT8: dict[int, Entries] = {
    80: (*_FEW_INT8, (_ANY, MatmulLaunch(128, 128, 128, 8, 3, False))),
    86: (*_FEW_INT8, (_ANY, MatmulLaunch(128, 128, 64, 8, 3, False))),
    89: (*_FEW_INT8, (_ANY, MatmulLaunch(128, 128, 64, 8, 3, False))),
    90: (*_FEW_INT8, (_ANY, MatmulLaunch(128, 128, 128, 8, 4, False))),
    100: (*_FEW_INT8, (_ANY, MatmulLaunch(128, 128, 128, 8, 4, False))),
}


@dataclass(frozen=True)
class RowLaunch:
    """One row times a matrix: tiles of ``block_out`` output features, ``block_panels`` panels of K at a time."""

    block_out: int
    block_panels: int
    num_warps: int
    programs_per_processor: int = 4


ONE_ROW: dict[int, RowLaunch] = {arch: RowLaunch(64, 1, 4) for arch in ARCHITECTURES}


def entry_for(entries: Entries, num_rows: int) -> MatmulLaunch:
    """The first that takes so many rows."""
    return next(launch for max_rows, launch in entries if num_rows <= max_rows)


_MIN_STEPS, _MAX_SPLITS = 4, 16


def num_splits(arch: int, programs_per_processor: int, num_tiles: int, num_steps: int) -> int:
    """Into how many parts K is cut so that all multiprocessors have work; a part has at least four steps."""
    wanted = NUM_PROCESSORS[arch] * programs_per_processor // num_tiles
    return max(1, min(wanted, num_steps // _MIN_STEPS, _MAX_SPLITS))


@dataclass(frozen=True)
class AttentionLaunch:
    """``tile`` tokens of the cache are looked at together by at least ``rows`` queries, a token and a head each.

    Where query heads that read one KV head are more than ``rows``, tiles are as high as those need.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int


# Of each architecture, by ascending head size: up to so much, and the launch. The last holds for any size.
AttentionEntries = tuple[tuple[int, AttentionLaunch], ...]

_DECODE: AttentionEntries = ((128, AttentionLaunch(16, 64, 4, 2)), (_ANY, AttentionLaunch(16, 32, 4, 2)))
DECODE: dict[int, AttentionEntries] = {arch: _DECODE for arch in ARCHITECTURES}
# On sm_90 queries are read from shared memory; elsewhere they take registers, or codes do: more warps share them.
_CHUNK: AttentionEntries = ((_ANY, AttentionLaunch(64, 32, 8, 2)),)
_CHUNK_90: AttentionEntries = ((128, AttentionLaunch(64, 32, 4, 2)), *_CHUNK)
CHUNK: dict[int, AttentionEntries] = {80: _CHUNK, 86: _CHUNK, 89: _CHUNK, 90: _CHUNK_90, 100: _CHUNK}
# No tensor core multiplies float32 as exactly: larger tiles would not fit into registers.
FLOAT32_ATTENTION = AttentionLaunch(16, 16, 8, 1)
# What one program of other kernels holds. Rope and the write into the cache: tokens and heads; copies of blocks: words;
# the search for the largest logit: logits.
ROPE_ROWS = 8
COPY_WORDS = 4096
GREEDY_LOGITS = 8192


def attention_entry(entries: AttentionEntries, head_dim: int, dtype: torch.dtype) -> AttentionLaunch:
    """The first that takes such heads."""
    if dtype == torch.float32:
        return FLOAT32_ATTENTION
    return next(launch for max_size, launch in entries if head_dim <= max_size)
