"""How chosen samples become blocks of equal length. Knows token ids, not texts.

``concatenate`` lays them end to end; a block may begin inside a sample, and attention crosses from one to the next.
``separate`` does the same and restarts the positions at every sample, by which attention keeps them apart. ``truncate``
gives each sample a block of its own and cuts it there. A sample that is cut short inside a row still ends with EOS.

Shapes: S sequences, L sequence_length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantpipe.calibration.sampling.quotas import cut

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """The first ``num_taken`` tokens of a sample; ``index`` is whatever the caller knows the sample by."""

    index: int
    token_ids: Sequence[int] | Ids
    num_taken: int


@dataclass(frozen=True)
class Packed:
    """Blocks [S, L], and the pieces in them in the order of their tokens."""

    token_ids: Ids
    position_ids: Ids | None
    pieces: tuple[Piece, ...]


def pack(pieces: Sequence[Piece], sequence_length: int, eos: int) -> Packed:
    """Lay pieces end to end and cut whole blocks; what is left over at the end is not used."""
    sizes = [piece.num_taken for piece in pieces]
    taken = cut(sizes, sum(sizes) // sequence_length * sequence_length)
    used = [Piece(piece.index, piece.token_ids, num) for piece, num in zip(pieces, taken, strict=False)]
    row = np.concatenate([np.zeros(0, dtype=np.int64), *(_closed(piece, eos) for piece in used)])
    return Packed(row.reshape(-1, sequence_length), None, tuple(used))


def pack_separately(pieces: Sequence[Piece], sequence_length: int, eos: int) -> Packed:
    """Like ``pack``, with position ids that restart where a sample begins, and at the beginning of each block."""
    packed = pack(pieces, sequence_length, eos)
    starts = np.zeros(packed.token_ids.size, dtype=np.int64)
    lengths = np.array([piece.num_taken for piece in packed.pieces], dtype=np.int64)
    begin = np.concatenate([np.zeros(0, dtype=np.int64), np.cumsum(lengths) - lengths])
    starts[begin] = begin
    starts[::sequence_length] = np.arange(0, packed.token_ids.size, sequence_length)
    positions = np.arange(packed.token_ids.size) - np.maximum.accumulate(starts)
    return Packed(packed.token_ids, positions.reshape(packed.token_ids.shape), packed.pieces)


def truncate(pieces: Sequence[Piece], sequence_length: int) -> Packed:
    """One block for each piece: the first ``sequence_length`` tokens of its sample, which has at least as many."""
    used = tuple(Piece(piece.index, piece.token_ids, sequence_length) for piece in pieces)
    rows = [np.asarray(piece.token_ids[:sequence_length], dtype=np.int64) for piece in used]
    return Packed(np.stack(rows) if rows else np.zeros((0, sequence_length), dtype=np.int64), None, used)


def _closed(piece: Piece, eos: int) -> Ids:
    """The tokens that are taken; EOS is the last of them also where the sample goes on."""
    taken = np.array(piece.token_ids[: piece.num_taken], dtype=np.int64)
    if piece.num_taken < len(piece.token_ids):
        taken[-1] = eos
    return taken
