"""Steps in which every sequence decodes one token: recorded once for a ladder of batch sizes, then replayed.

Launching the kernels of a step one by one takes the host longer than the GPU takes to run them; a CUDA graph launches
all of them at once. What is recorded reads fixed memory, so a step is written there first, in one copy, and filled up
to the next size of the ladder. A row that fills up has slot -1, which the kernel that writes keys and values passes
over, and holds 0 tokens, to which attention gives zeros: no block is read or written for it, and every number of the
pool may belong to a sequence.

How far attention is split depends on shapes alone, and those are of the longest sequence that may come.

Shapes: S sequences of the recorded size, n those of a batch, B KV blocks of the longest table, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quantpipe.backends.protocol import BatchInput, DecodeLimits
from quantpipe.backends.triton.kv_cache import TritonKVCache
from quantpipe.backends.triton.ops.attention_decode import Decodes
from quantpipe.backends.triton.ops.attention_tile import FAR
from quantpipe.backends.triton.ops.sampling import most_likely
from quantpipe.backends.triton.step import StepTensors

NO_SLOT = -1
_SMALL_SIZES = (1, 2, 4, 8)
_SIZE_STEP = 8
# Runs before recording: the first compiles kernels, and libraries take the buffers that they keep.
_NUM_FIRST_RUNS = 2

Replay = Callable[[], None]


class Recorder(Protocol):
    """Turns work on fixed memory into something that does the same work again."""

    def record(self, work: Replay) -> Replay: ...


class GraphRecorder:
    """Records CUDA graphs. They share one pool of memory, so no two may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Replay) -> Replay:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(_NUM_FIRST_RUNS):
                work()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads of the process do on the GPU meanwhile is none of this recording's business.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph.replay


class DirectRecorder:
    """Records nothing: the work itself is done each time, on the same memory. So it is tested without a GPU."""

    def record(self, work: Replay) -> Replay:
        return work


def recorder_for(device: torch.device) -> Recorder:
    """Graphs on a GPU; where kernels are interpreted there are none."""
    return GraphRecorder(device) if device.type == "cuda" else DirectRecorder()


def ladder(max_num_seqs: int) -> tuple[int, ...]:
    """The batch sizes that are recorded: 1, 2, 4, 8, multiples of 8, and the largest there can be."""
    sizes = {size for size in _SMALL_SIZES if size < max_num_seqs}
    return (*sorted(sizes | set(range(2 * _SIZE_STEP, max_num_seqs, _SIZE_STEP))), max_num_seqs)


class Replayed(NamedTuple):
    """What came out for the sequences of a batch: token ids [n] and logits [n, V], valid until the next replay."""

    token_ids_n: Tensor
    logits_nV: Tensor


class _Fields(NamedTuple):
    """The numbers of a step, views of one piece of memory that begin at 16 bytes each."""

    token_ids_S: Tensor
    positions_S: Tensor
    slots_S: Tensor
    held_S: Tensor
    shift_S: Tensor
    table_SB: Tensor

    @classmethod
    def of(cls, words: Tensor, size: int, num_blocks: int) -> "_Fields":
        per_field = size + size % 2
        token_ids_S, positions_S, slots_S, held_S, shift_S = (
            words[start : start + size] for start in range(0, 5 * per_field, per_field)
        )
        table_SB = words[5 * per_field :][: size * num_blocks].view(size, num_blocks)
        return cls(token_ids_S, positions_S, slots_S, held_S, shift_S, table_SB)

    @staticmethod
    def num_words(size: int, num_blocks: int) -> int:
        return 5 * (size + size % 2) + size * num_blocks


class _Staging:
    """Numbers that the host writes and the device reads: one copy brings them over."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.host = torch.zeros(num_words, dtype=torch.int64, pin_memory=is_cuda)
        self.device = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._sent = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until the last copy was read. Where results of that step were read there is nothing to wait for."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, num_words: int) -> None:
        self.device[:num_words].copy_(self.host[:num_words], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class RecordedDecodes:
    """Decode steps over one KV cache within ``limits``. Other steps are not its concern: ``replay`` gives None."""

    def __init__(
        self,
        limits: DecodeLimits,
        kv: TritonKVCache,
        run: Callable[[StepTensors, TritonKVCache], Tensor],
        vocab_size: int,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        self.limits, self.kv, self.sizes = limits, kv, ladder(limits.max_num_seqs)
        self._run = run
        self._staging = _Staging(_Fields.num_words(limits.max_num_seqs, limits.max_blocks), device)
        self._token_ids_S = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)
        self._logits_SV = torch.zeros(limits.max_num_seqs, vocab_size, dtype=torch.float32, device=device)
        self._rows_S = torch.arange(limits.max_num_seqs, device=device)
        self._host = {size: _Fields.of(self._staging.host, size, limits.max_blocks) for size in self.sizes}
        # From the largest down, so that the memory of the first is enough for all.
        self._replays = {size: self._recorded(size, recorder) for size in reversed(self.sizes)}

    def takes(self, batch: BatchInput, kv: TritonKVCache) -> bool:
        """Whether a batch is of the recorded kind: each sequence reads one token and wants its logits."""
        num_seqs, limits = len(batch.query_lens), self.limits
        return (
            kv is self.kv
            and len(batch.token_ids_T) == num_seqs == len(batch.logit_rows_R) <= limits.max_num_seqs
            and batch.block_table_SB.shape[1] <= limits.max_blocks
            and (batch.num_sinks, batch.window) == (limits.num_sinks, limits.window)
        )

    def replay(self, batch: BatchInput, kv: TritonKVCache) -> Replayed | None:
        """Write the keys and values of a step and compute it; None, and nothing done, where it must run by itself."""
        if not self.takes(batch, kv):
            return None
        num_seqs = len(batch.query_lens)
        size = next(size for size in self.sizes if num_seqs <= size)
        self._staging.wait()
        self._fill(self._host[size], batch)
        self._staging.send(_Fields.num_words(size, self.limits.max_blocks))
        self._replays[size]()
        return Replayed(self._token_ids_S[:num_seqs], self._logits_SV[:num_seqs])

    def _recorded(self, size: int, recorder: Recorder) -> Replay:
        self._fill(self._host[size], None)
        self._staging.send(_Fields.num_words(size, self.limits.max_blocks))
        replay = recorder.record(partial(self._compute, size))
        self._staging.wait()
        return replay

    def _fill(self, fields: _Fields, batch: BatchInput | None) -> None:
        """Write a batch, or nothing but rows that fill up, in the host's memory. Tables keep what nobody reads."""
        num_seqs = 0 if batch is None else len(batch.query_lens)
        if batch is not None:
            block_size = self.kv.block_size
            fields.token_ids_S[:num_seqs] = batch.token_ids_T
            fields.positions_S[:num_seqs] = batch.positions_T
            fields.slots_S[:num_seqs] = batch.slot_mapping_T
            fields.held_S[:num_seqs] = torch.tensor(batch.held_lens(block_size))
            dropped = batch.dropped_blocks or (0,) * num_seqs
            fields.shift_S[:num_seqs] = torch.tensor([min(num * block_size, FAR) for num in dropped])
            fields.table_SB[:num_seqs, : batch.block_table_SB.shape[1]] = batch.block_table_SB
        for field, value in zip(fields[:5], (0, 0, NO_SLOT, 0, 0), strict=True):
            field[num_seqs:] = value

    @torch.no_grad()
    def _compute(self, size: int) -> None:
        """The whole step, from memory that stays where it is to memory that stays where it is."""
        fields, rows_S = _Fields.of(self._staging.device, size, self.limits.max_blocks), self._rows_S[:size]
        step = StepTensors(
            fields.token_ids_S,
            fields.positions_S,
            fields.slots_S,
            rows_S,
            decodes=Decodes(rows_S, fields.held_S, fields.shift_S, fields.table_SB),
            chunks=None,
            num_sinks=self.limits.num_sinks,
            window=self.limits.window,
        )
        logits_SV = self._run(step, self.kv)
        self._logits_SV[:size].copy_(logits_SV)
        self._token_ids_S[:size].copy_(most_likely(logits_SV))
