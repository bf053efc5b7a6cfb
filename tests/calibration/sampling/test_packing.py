"""Cutting samples into blocks, against plain lists."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quantpipe.calibration.sampling.packing import Piece, pack, pack_separately, truncate
from quantpipe.calibration.sampling.quotas import cut

EOS = 0


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    """Samples that end with EOS and hold none before, of which all or the first tokens are taken."""
    sizes = draw(st.lists(st.integers(1, 12), max_size=30))
    samples = [[i + 1] * (size - 1) + [EOS] for i, size in enumerate(sizes)]
    return [Piece(i, sample, draw(st.integers(1, len(sample)))) for i, sample in enumerate(samples)]


@given(given=pieces(), sequence_length=st.integers(1, 10))
def test_blocks_are_the_pieces_end_to_end_each_closed_by_eos(given: list[Piece], sequence_length: int) -> None:
    packed = pack(given, sequence_length, EOS)
    sizes = [piece.num_taken for piece in given]
    num_tokens = sum(sizes) // sequence_length * sequence_length
    expected = [
        token
        for piece, num_taken in zip(given, cut(sizes, num_tokens), strict=False)
        for token in [*piece.token_ids[: num_taken - 1], EOS]
    ]
    assert packed.token_ids.shape == (num_tokens // sequence_length, sequence_length)
    assert packed.token_ids.dtype == np.int64
    assert packed.token_ids.ravel().tolist() == expected
    assert sum(piece.num_taken for piece in packed.pieces) == num_tokens
    assert np.count_nonzero(packed.token_ids == EOS) == len(packed.pieces)
    assert all(a.index < b.index for a, b in pairwise(packed.pieces))


@given(given=pieces(), sequence_length=st.integers(1, 10))
def test_separate_positions_count_from_the_start_of_a_sample_or_block(given: list[Piece], sequence_length: int) -> None:
    packed = pack_separately(given, sequence_length, EOS)
    assert packed.token_ids.tolist() == pack(given, sequence_length, EOS).token_ids.tolist()
    assert packed.position_ids is not None
    expected, offset = [], 0
    for piece in packed.pieces:
        for position in range(piece.num_taken):
            in_block = (offset + position) % sequence_length
            expected.append(min(position, in_block))
        offset += piece.num_taken
    assert packed.position_ids.ravel().tolist() == expected


@given(sizes=st.lists(st.integers(4, 12), max_size=8))
def test_truncated_blocks_hold_one_sample_each(sizes: list[int]) -> None:
    samples = [[i + 1] * size for i, size in enumerate(sizes)]
    packed = truncate([Piece(i, sample, len(sample)) for i, sample in enumerate(samples)], 4)
    assert packed.token_ids.tolist() == [sample[:4] for sample in samples]
    assert [piece.num_taken for piece in packed.pieces] == [4] * len(sizes)
    assert packed.position_ids is None
