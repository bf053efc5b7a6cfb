"""What a model takes on disk and in the engine that served it."""

import math
from collections import Counter
from pathlib import Path

from quantpipe.engine.engine import Engine
from quantpipe.formats.artifact import Artifact
from quantpipe.reporting.sections.memory import MemoryRow

BYTES_OF = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}  # any other takes one


def memory_row(name: str, folder: Path, engine: Engine) -> MemoryRow:
    """The memory of the model in ``folder``, which ``engine`` serves."""
    blocks = engine.stats().total_blocks
    num_tokens = max(blocks * engine.config.block_size, 1)
    account, step = engine.memory, engine.memory.step
    other = {} if step is None else {"activations of a step": step.activation_bytes, "workspace": step.workspace_bytes}
    return MemoryRow(
        engine=name,
        stored=stored_bytes(Artifact.open(folder)),
        kv_dtype=engine.kv_dtype,
        kv_bytes_per_token=round(account.kv_cache_bytes / num_tokens),
        weight_bytes=account.weight_bytes,
        kv_cache_bytes=account.kv_cache_bytes,
        other=other,
    )


def stored_bytes(artifact: Artifact) -> dict[str, int]:
    """Bytes of the weights by scheme; those of no scheme by their dtype. Largest first."""
    totals: Counter[str] = Counter()
    for name, tensor in artifact.stored.items():
        scheme = artifact.scheme_of(name.rpartition(".")[0])
        label = tensor.spec.dtype if scheme is None else scheme.label
        totals[label] += math.prod(tensor.spec.shape) * BYTES_OF.get(tensor.spec.dtype, 1)
    return dict(totals.most_common())
