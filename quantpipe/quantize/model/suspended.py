"""Forward passes through one block that stop on their way, so that it is quantized between its sub-steps in one pass.

Each batch runs in a thread of its own that stops where it first reaches one of the groups of linears that are waited
for. Exactly one thread runs at a time, the one that is advanced; numbers do not depend on the order of threads. What
stopped runs keep alive is bounded: beyond a budget a run is given up, and later repeated from the block's beginning,
with the same numbers, because the weights that it passes on its way are final by then.

Shapes: S sequences, L tokens per sequence, D hidden size, K in_features.
"""

import contextvars
import ctypes
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from quantpipe.errors import DataError
from quantpipe.quantize.model.block_kwargs import tensors_of
from quantpipe.quantize.model.block_runs import Batch, run_block
from quantpipe.quantize.model.watched_attention import watching_while

# What all stopped runs of a block may keep alive together.
MAX_SUSPENDED_BYTES = 1 << 30


def return_free_memory() -> None:
    """Give memory that was freed back to the system, where the C library (glibc) keeps it for each thread apart."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _AbandonedError(BaseException):
    """Ends a suspended run in its thread. No Exception: a block that catches those must not swallow it."""


class _Run:
    """One forward pass in a thread of its own, which is let run and waits by turns."""

    def __init__(self, forward: Callable[[], Tensor]) -> None:
        self.stopped_at: int | None = None
        self.input_K: Tensor | None = None
        self.output_SLD: Tensor | None = None
        self.calls: set[str] = set()
        self._noted: list[weakref.ref[Tensor]] = []
        self._error: BaseException | None = None
        self._abandoned = False
        self._may_run, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        # In a copy of the caller's context: what is watched there is watched in the thread.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._work, forward), daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Let the thread run until it stops or ends; raise here what it raised."""
        self.stopped_at, self.input_K = None, None
        self._may_run.release()
        self._has_stopped.acquire()
        if self._error is not None:
            raise self._error

    def stop(self, group: int, x_K: Tensor) -> None:
        """Called in the thread: hand over to the one that resumed it, and wait."""
        self.stopped_at, self.input_K = group, x_K
        del x_K
        self._has_stopped.release()
        self._may_run.acquire()
        if self._abandoned:
            raise _AbandonedError

    def abandon(self) -> None:
        """End the thread and let go of what it holds."""
        self._abandoned = True
        self.input_K = None
        self._may_run.release()
        self._thread.join()

    def note(self, tensor: Tensor) -> None:
        self._noted.append(weakref.ref(tensor))

    def alive(self) -> dict[int, int]:
        """About what the run keeps: its input (for the residual stream) and what its block is called with, what linears
        read and gave out, its output. Address of the memory -> bytes."""
        tensors = [tensor for ref in self._noted if (tensor := ref()) is not None]
        if self.output_SLD is not None:
            tensors.append(self.output_SLD)
        return {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors}

    def _work(self, forward: Callable[[], Tensor]) -> None:
        self._may_run.acquire()
        try:
            if not self._abandoned:
                with torch.no_grad():  # grad mode belongs to the thread
                    self.output_SLD = forward()
        except _AbandonedError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._has_stopped.release()


class SuspendedRuns:
    """The passes of all batches through one block, stopping at ``groups`` of its linears in their order.

    ``linears`` are all that are quantized, by their names in the block. Whoever watches the caller's attention is shown
    each call once, however often a pass is repeated; nothing if not ``is_watched``. Use this as a context; it leaves no
    thread and no hook behind.
    """

    def __init__(
        self,
        block: nn.Module,
        linears: Mapping[str, nn.Module],
        groups: Sequence[Sequence[str]],
        batches: Sequence[Batch],
        max_bytes: int,
        is_watched: bool = True,
    ) -> None:
        self._block, self._batches, self._max_bytes, self._is_watched = block, batches, max_bytes, is_watched
        self._runs: dict[int, _Run] = {}
        self._visited: dict[int, set[int]] = {number: set() for number in range(len(batches))}
        self._current: tuple[int, _Run] | None = None
        self._groups, self._linears = groups, linears
        self._group_of = {name: index for index, group in enumerate(groups) for name in group}
        self._hooks: list[Any] = []

    def __enter__(self) -> "SuspendedRuns":
        for name, linear in self._linears.items():
            self._hooks.append(linear.register_forward_pre_hook(self._before(name)))
            self._hooks.append(linear.register_forward_hook(self._after))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        for number in list(self._runs):
            self.drop(number)

    def advance(self, number: int, group: int) -> Tensor | None:
        """What batch ``number`` feeds the linears of ``group`` [..., K]; None where it does not reach them.

        Groups must be asked for in order, and ``release`` called when the tensor has been used.
        """
        run = self._started(number)
        if run.stopped_at is None and run.output_SLD is None:
            self._resume(number)
        if run.stopped_at is not None and run.stopped_at < group:
            raise self._order_differs(run.stopped_at)
        if run.stopped_at != group:
            return None
        self._visited[number].add(group)
        return run.input_K

    def release(self, number: int, group: int) -> None:
        """Note that ``group`` is done with for this batch: it goes on later, or is given up if memory is short."""
        run = self._runs[number]
        if run.stopped_at == group:
            run.input_K, run.stopped_at = None, None
        if self._alive_bytes() > self._max_bytes:
            self.drop(number)
        return_free_memory()

    def _alive_bytes(self) -> int:
        alive: dict[int, int] = {}  # what several runs share counts once
        for run in self._runs.values():
            alive |= run.alive()
        return sum(alive.values())

    def drop(self, number: int) -> None:
        """End the pass of batch ``number``; if it is asked for again it begins anew."""
        if number in self._runs:
            self._runs.pop(number).abandon()

    def finish(self, number: int) -> Tensor:
        """The block's output [S, L, D] for batch ``number``, whose run ends with it."""
        run = self._started(number)
        if run.output_SLD is None:
            self._resume(number)
        if run.output_SLD is None:
            raise self._order_differs(run.stopped_at or 0)
        output_SLD = run.output_SLD
        self.drop(number)
        return output_SLD

    def _order_differs(self, group: int) -> DataError:
        """A batch reached ``group`` when its turn was over: it would have been solved without that batch."""
        names = ", ".join(self._groups[group])
        return DataError(f"{names}: runs in an order that differs between batches; list it under quantize.ignore")

    def _started(self, number: int) -> _Run:
        if number not in self._runs:
            self._runs[number] = _Run(partial(self._forward, number))
        return self._runs[number]

    def _forward(self, number: int) -> Tensor:
        batch = self._batches[number]
        for tensor in (batch.hidden_SLD, *tensors_of(batch.kwargs)):
            self._runs[number].note(tensor)
        with watching_while(self._is_first_time):
            return run_block(self._block, batch)

    def _resume(self, number: int) -> None:
        run = self._runs[number]
        self._current = (number, run)
        run.resume()
        self._current = None

    def _is_first_time(self) -> bool:
        """Whether the pass that now runs is watched, and has not been at this place of the block before."""
        assert self._current is not None
        number, run = self._current
        passed = {self._group_of[name] for name in run.calls if name in self._group_of}
        return self._is_watched and passed >= self._visited[number]

    def _before(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        group = self._group_of.get(name)

        def reach(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            assert self._current is not None
            number, run = self._current
            if name in run.calls:
                raise DataError(f"{name} runs twice in one pass of its block; list it under quantize.ignore")
            is_new = group is not None and group not in self._visited[number]
            run.calls.add(name)
            run.note(args[0])
            if is_new and group is not None:
                run.stop(group, args[0])

        return reach

    def _after(self, _module: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> None:
        if self._current is not None:
            self._current[1].note(output)
