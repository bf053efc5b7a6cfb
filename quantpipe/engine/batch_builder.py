"""Builds the batch of each step: anew, or, where the same sequences go on decoding, from the one before.

Shapes: T tokens of this step, S sequences, B KV blocks of the longest table.
"""

import numpy as np
import numpy.typing as npt
import torch

from quantpipe.backends.protocol import BatchInput
from quantpipe.engine.attention_window import AttentionWindow
from quantpipe.engine.batch import build_batch
from quantpipe.engine.step import Advance, Step

Ints = npt.NDArray[np.int64]


class BatchBuilder:
    """Use for every step of an engine in turn. A batch is valid until the next one is built: they share arrays."""

    def __init__(self, window: AttentionWindow) -> None:
        self._window = window
        self._advances: tuple[Advance, ...] = ()
        self._last: BatchInput | None = None

    def build(self, step: Step) -> BatchInput:
        """What ``build_batch`` gives."""
        last, before = self._last, self._advances
        if last is not None and not step.copies and _go_on(before, step.advances):
            batch = self._next(last, step.advances)
        else:
            batch = build_batch(step, self._window)
        # Where blocks were let go, the others have moved up in the table.
        is_start = batch.dropped_blocks == () and _all_decode(step.advances)
        self._advances, self._last = step.advances, batch if is_start else None
        return batch

    def _next(self, last: BatchInput, advances: tuple[Advance, ...]) -> BatchInput:
        """Each sequence a token further. Only where one begins a block is its table looked at."""
        block_size = self._window.block_size
        token_ids_T, positions_T, slots_T = (
            tensor.numpy() for tensor in (last.token_ids_T, last.positions_T, last.slot_mapping_T)
        )
        token_ids_T[:] = [advance.seq.token_ids[advance.start] for advance in advances]
        positions_T += 1
        slots_T += 1
        table_SB = last.block_table_SB
        begins_S = positions_T % block_size == 0
        if begins_S.any():
            table_SB = _with_columns(table_SB, int(positions_T.max()) // block_size + 1)
            for row in np.flatnonzero(begins_S).tolist():
                num_blocks = advances[row].start // block_size + 1
                blocks = advances[row].seq.block_table[:num_blocks]
                table_SB[row, :num_blocks] = torch.tensor(blocks)  # one just filled may be another's by now
                slots_T[row] = blocks[-1] * block_size
        return BatchInput(
            token_ids_T=last.token_ids_T,
            positions_T=last.positions_T,
            slot_mapping_T=last.slot_mapping_T,
            query_lens=last.query_lens,
            context_lens=tuple((positions_T + 1).tolist()),
            block_table_SB=table_SB,
            logit_rows_R=last.logit_rows_R,
            num_sinks=last.num_sinks,
            window=last.window,
        )


def _all_decode(advances: tuple[Advance, ...]) -> bool:
    return all(advance.num_tokens == 1 and advance.num_logit_rows == 1 for advance in advances)


def _go_on(before: tuple[Advance, ...], now: tuple[Advance, ...]) -> bool:
    """Whether each sequence reads the one token behind what it read last, and holds all of its blocks."""
    if len(before) != len(now):
        return False
    for (last, last_start, *_), (seq, start, num_tokens, num_rows, _) in zip(before, now, strict=True):
        is_next = seq is last and start == last_start + 1 and num_tokens == 1 and num_rows == 1
        if not is_next or seq.num_dropped_blocks:
            return False
    return True


def _with_columns(table_SB: torch.Tensor, num_columns: int) -> torch.Tensor:
    """As wide as a table of this step is: never narrower than the last one, whose sequences are the same."""
    num_more = num_columns - table_SB.shape[1]
    return torch.nn.functional.pad(table_SB, (0, num_more)) if num_more > 0 else table_SB
