"""A step as the backend reads it: the scheduler's choice turned into flat tensors. Knows no sampling rule.

Shapes: T tokens of this step, S sequences, B KV blocks of the longest table, R rows whose logits are wanted.
"""

from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from quantpipe.backends.protocol import BatchInput
from quantpipe.engine.attention_window import AttentionWindow
from quantpipe.engine.scheduler import Step


def build_batch(step: Step, window: AttentionWindow) -> BatchInput:
    """Concatenate the sequences of ``step`` in its order. The work per sequence does not depend on its context."""
    block_size = window.block_size
    advances = step.advances
    query_lens_S = np.array([advance.num_tokens for advance in advances], dtype=np.int64)
    starts_S = np.array([advance.start for advance in advances], dtype=np.int64)
    num_rows_S = np.array([advance.num_logit_rows for advance in advances], dtype=np.int64)
    parts = ((advance.seq.token_ids[advance.start : advance.end], advance.draft_ids) for advance in advances)
    token_ids = chain.from_iterable(chain.from_iterable(parts))

    positions_T = _ranges(starts_S, query_lens_S)
    seq_of_T = np.repeat(np.arange(len(advances)), query_lens_S)
    dropped_S = np.array([advance.seq.num_dropped_blocks for advance in advances], dtype=np.int64)
    block_table_SB = _block_tables(step, block_size)
    # What was dropped lies before every token that is still to be read.
    indices_T = positions_T // block_size - dropped_S[seq_of_T]
    slot_mapping_T = block_table_SB[seq_of_T, indices_T] * block_size + positions_T % block_size
    # The wanted rows are the last ones of each sequence.
    logit_rows_R = _ranges(np.cumsum(query_lens_S) - num_rows_S, num_rows_S)
    return BatchInput(
        token_ids_T=torch.from_numpy(np.fromiter(token_ids, dtype=np.int64, count=len(positions_T))),
        positions_T=torch.from_numpy(positions_T),
        slot_mapping_T=torch.from_numpy(slot_mapping_T),
        query_lens=tuple(query_lens_S.tolist()),
        context_lens=tuple((starts_S + query_lens_S).tolist()),
        block_table_SB=torch.from_numpy(block_table_SB),
        logit_rows_R=torch.from_numpy(logit_rows_R),
        num_sinks=window.num_sinks,
        window=window.asked,
        dropped_blocks=tuple(dropped_S.tolist()) if dropped_S.any() else (),
    )


def _block_tables(step: Step, block_size: int) -> npt.NDArray[np.int64]:
    """The blocks each sequence uses up to the end of this step, padded with 0: [S, B]."""
    num_blocks_S = [-(-advance.end // block_size) - advance.seq.num_dropped_blocks for advance in step.advances]
    table_SB = np.zeros((len(num_blocks_S), max(num_blocks_S)), dtype=np.int64)
    for row, (advance, num_blocks) in enumerate(zip(step.advances, num_blocks_S, strict=True)):
        table_SB[row, :num_blocks] = advance.seq.block_table[:num_blocks]
    return table_SB


def _ranges(starts_S: npt.NDArray[np.int64], lens_S: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """starts[0] .. starts[0] + lens[0], then the same of every other s, concatenated."""
    firsts_S = np.cumsum(lens_S) - lens_S
    ranges: npt.NDArray[np.int64] = np.arange(lens_S.sum(), dtype=np.int64) + np.repeat(starts_S - firsts_S, lens_S)
    return ranges
