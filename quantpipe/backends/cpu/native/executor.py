"""Executes a step of a decoder as one call of the compiled kernels.

Shapes: T tokens of the step, S sequences, B KV blocks, R rows whose logits are wanted, V vocabulary.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quantpipe.backends.cpu.native.kv_cache import NativeKVCache, block_bytes
from quantpipe.backends.cpu.native.library import Library, load_library
from quantpipe.backends.cpu.native.linears import LinearSettings
from quantpipe.backends.cpu.native.plan import NativePlan, build_plan
from quantpipe.backends.cpu.native.structures import Batch
from quantpipe.backends.protocol import ACTIVATION_BITS, Activations, BatchInput, DecodeLimits, KVCache
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.kv_mode import KV_MODES
from quantpipe.formats.kv_scales import read_kv_scales
from quantpipe.models.description import DecoderDescription
from quantpipe.models.weights import check_tensors


@dataclass
class _ContextCount:
    num_tokens: int = 0


@dataclass(frozen=True)
class NativeExecutor:
    """A loaded model."""

    folder: Path
    description: DecoderDescription
    library: Library
    plan: NativePlan
    notes: tuple[str, ...]
    _context_count: _ContextCount = field(default_factory=_ContextCount)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def weight_bytes(self) -> int:
        return self.plan.weight_bytes

    @property
    def supports_windows(self) -> bool:
        return True

    @property
    def context_tokens(self) -> tuple[int, int]:
        """Nothing is padded."""
        return self._context_count.num_tokens, self._context_count.num_tokens

    @property
    def step_times_s(self) -> dict[str, float]:
        return self.plan.times_s()

    def kv_bytes_per_block(self, block_size: int, dtype: str) -> int:
        shape = self.description
        return shape.num_layers * block_bytes(self.library, shape.num_kv_heads, shape.head_dim, block_size, dtype)

    def allocate_kv_cache(self, num_blocks: int, block_size: int, dtype: str) -> NativeKVCache:
        shape = self.description
        sizes = (shape.num_layers, shape.num_kv_heads, shape.head_dim)
        scales = read_kv_scales(self.folder, *sizes[:2]) if KV_MODES[dtype].needs_scales else None
        return NativeKVCache(self.library, num_blocks, block_size, dtype, *sizes, scales)

    def record_decodes(self, kv_cache: KVCache, limits: DecodeLimits) -> None:
        """Nothing: there is no launch to save."""

    def forward(self, batch: BatchInput, kv_cache: KVCache) -> Tensor:
        """Write this step's keys and values, and return float32 logits [R, V]."""
        logits_RV = torch.empty(batch.logit_rows_R.shape[0], self.description.vocab_size)
        self._run(batch, kv_cache, logits_RV, None)
        return logits_RV

    def forward_greedy(self, batch: BatchInput, kv_cache: KVCache) -> Tensor:
        """The same, but only the most likely token of each row [R]: its logits never leave the kernels."""
        token_ids_R = torch.empty(batch.logit_rows_R.shape[0], dtype=torch.int32)
        self._run(batch, kv_cache, None, token_ids_R)
        return token_ids_R

    def _run(self, batch: BatchInput, kv_cache: KVCache, logits_RV: Tensor | None, token_ids_R: Tensor | None) -> None:
        if not isinstance(kv_cache, NativeKVCache):
            raise TypeError(f"the native cpu backend was given a {type(kv_cache).__name__}")
        query_lens_S = np.array(batch.query_lens, dtype=np.int64)
        context_lens_S = np.array(batch.context_lens, dtype=np.int64)
        dropped_blocks_S = np.array(batch.dropped_blocks, dtype=np.int64)
        block_table_SB = batch.block_table_SB.contiguous()
        structure = Batch(
            num_tokens=batch.token_ids_T.shape[0],
            num_sequences=len(query_lens_S),
            table_width=block_table_SB.shape[1],
            num_rows=batch.logit_rows_R.shape[0],
            num_sinks=batch.num_sinks,
            window=batch.window or 0,
            token_ids=batch.token_ids_T.data_ptr(),
            positions=batch.positions_T.data_ptr(),
            slots=batch.slot_mapping_T.data_ptr(),
            query_lens=query_lens_S.ctypes.data,
            context_lens=context_lens_S.ctypes.data,
            block_table=block_table_SB.data_ptr(),
            logit_rows=batch.logit_rows_R.data_ptr(),
            dropped_blocks=dropped_blocks_S.ctypes.data if batch.dropped_blocks else None,
        )
        self.plan.forward(structure, kv_cache.structure, logits_RV, token_ids_R)
        self._context_count.num_tokens += sum(batch.context_lens)


def load_native(
    artifact: Artifact,
    description: DecoderDescription,
    activation_divisor: float,
    num_threads: int,
    activations: Activations,
) -> NativeExecutor:
    """Pack every weight, after a check of all tensors. NativeError where the kernels cannot run this model here."""
    library = load_library()
    check_tensors(description, artifact)
    settings = LinearSettings(activation_divisor, ACTIVATION_BITS[activations])
    plan = build_plan(library, artifact, description, settings, num_threads)
    for dtype in KV_MODES:  # refused now and not when a cache is asked for
        block_bytes(library, description.num_kv_heads, description.head_dim, 1, dtype)
    return NativeExecutor(artifact.folder, description, library, plan, _notes(library, description, activations))


def _notes(library: Library, description: DecoderDescription, activations: Activations) -> tuple[str, ...]:
    instruction_sets = library.call("qp_isa_note").decode()
    schemes = dict.fromkeys(spec.scheme for spec in description.linears() if spec.scheme is not None)
    names = dict.fromkeys(scheme.name for scheme in schemes if scheme.activation_bits is None)
    rounding = (f"{name}: {_ACTIVATION_NOTES[activations]}" for name in names)
    return (*description.notes, *([instruction_sets] if instruction_sets else []), *rounding)


_ACTIVATION_NOTES: dict[Activations, str] = {
    "int8": "activations are rounded to 8 bits per token and weight group; engine.activations: int16 is closer",
    "int16": "activations are rounded to 15 bits or more per token and weight group",
    "float32": "activations stay in float32, slower; engine.activations: int16 is faster and nearly as close",
}
