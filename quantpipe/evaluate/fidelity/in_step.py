"""One model's logits of a window, handed out as they are needed, while another model reads the same window.

A chunk of each is in memory at a time, however long the window is.

Shapes: T positions of the window that predict a token, R rows of one chunk, V vocabulary.
"""

import threading
from collections.abc import Generator
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from quantpipe.engine.request import SamplingParams
from quantpipe.errors import DataError
from quantpipe.evaluate.served import ServedModel

LogitsArray = npt.NDArray[np.float32]
Chunk = tuple[int, LogitsArray]
READ_ONLY_PARAMS = SamplingParams(max_tokens=0, ignore_eos=True)


class _AbandonedError(Exception):
    """Nobody wants the rest of the logits; ends the model's own thread."""


def logits_in_step(model: ServedModel, token_ids: tuple[int, ...]) -> Generator[Chunk]:
    """The chunks of a window's logits, each with its first position; the model waits until the next is asked for.

    The model runs in a thread of its own, never while the caller does. What it raises is raised here.
    """
    handed: SimpleQueue[Chunk | BaseException | None] = SimpleQueue()
    go_on, is_abandoned = threading.Semaphore(0), threading.Event()

    def hand_over(first: int, logits_RV: LogitsArray) -> None:
        handed.put((first, logits_RV))
        go_on.acquire()
        if is_abandoned.is_set():
            raise _AbandonedError

    def read() -> None:
        try:
            model.generate([token_ids], READ_ONLY_PARAMS, prompt_logits_sinks=[hand_over])
            handed.put(None)
        except BaseException as error:  # raised again where it can be dealt with
            handed.put(error)

    thread = threading.Thread(target=read, name="logits", daemon=True)
    thread.start()
    try:
        while (chunk := handed.get()) is not None:
            if isinstance(chunk, BaseException):
                raise chunk
            yield chunk
            go_on.release()
    finally:
        is_abandoned.set()
        go_on.release()
        thread.join()


class RowsInStep:
    """Rows of a model's logits, taken in order of position. DataError, beginning with ``where``, for any left out."""

    def __init__(self, model: ServedModel, token_ids: tuple[int, ...], where: str) -> None:
        self._chunks = logits_in_step(model, token_ids)
        self._where = where
        self._num_rows_T = np.zeros(len(token_ids) - 1, dtype=np.int64)
        self._held: LogitsArray | None = None  # rows not taken yet
        self._end = 0  # of what the model has handed over

    def take(self, num_rows: int) -> LogitsArray:
        """The next rows [R, V]; to be used before the next call."""
        parts: list[LogitsArray] = []
        num_missing = num_rows
        while True:
            held = self._next_chunk() if self._held is None else self._held
            parts.append(held[:num_missing])
            self._held = held[num_missing:] if len(held) > num_missing else None
            num_missing -= len(parts[-1])
            if num_missing == 0:
                return parts[0] if len(parts) == 1 else np.concatenate(parts)
            parts[-1] = parts[-1].copy()  # the model may use its memory again

    def finish(self) -> None:
        """Let the model end. DataError unless each position got one row."""
        for first, rows_RV in self._chunks:
            self._count(first, len(rows_RV))
        require_one_row_each(self._num_rows_T, self._where)

    def close(self) -> None:
        """End the model wherever it is."""
        self._chunks.close()

    def _next_chunk(self) -> LogitsArray:
        first, rows_RV = next(self._chunks, (self._end, None))
        if rows_RV is None or first != self._end:
            if rows_RV is not None:
                self._count(first, len(rows_RV))
            self.finish()
            raise DataError(f"{self._where}: logits did not come in order of position")
        self._count(first, len(rows_RV))
        self._end += len(rows_RV)
        return rows_RV

    def _count(self, first: int, num_rows: int) -> None:
        self._num_rows_T[first : first + num_rows] += 1


def require_one_row_each(num_rows_T: npt.NDArray[np.int64], where: str) -> None:
    """DataError where a position got no row of logits, or several."""
    wrong = np.flatnonzero(num_rows_T != 1)
    if len(wrong):
        raise DataError(
            f"{where}: {len(wrong)} of {len(num_rows_T)} positions did not get one row of logits; the first, position "
            f"{wrong[0]}, got {num_rows_T[wrong[0]]}"
        )
