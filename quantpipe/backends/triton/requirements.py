"""What the kernels need of the machine and of a model; everything else is refused before anything is loaded."""

from pathlib import Path

import torch
import triton

from quantpipe.backends.triton.ops.norm import check_size
from quantpipe.backends.triton.weight_bytes import WeightBytes
from quantpipe.errors import DataError, RecipeError
from quantpipe.models.description import AttentionSpec, DecoderDescription

MIN_CAPABILITY = (8, 0)
MAX_HEAD_DIM = 256
# Query heads that read one KV head: all of a token stand in one tile.
MAX_GROUP = 64
INTERPRETED = "triton: kernels are interpreted on the CPU, which is for tests; bfloat16 is computed in float32"
OTHER_BACKENDS = "choose another backend, such as 'cpu'"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def usable_device() -> torch.device:
    """The GPU that kernels run on, or the CPU where Triton interprets them. RecipeError where there is neither."""
    if (fault := machine_fault()) is not None:
        raise RecipeError(f"engine.backend: 'triton' {fault}; {OTHER_BACKENDS}")
    if triton.knobs.runtime.interpret:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def machine_fault() -> str | None:
    """What kernels need and this machine lacks, as ``needs ..., and ...``; None where they run or are interpreted."""
    if triton.knobs.runtime.interpret:
        return None
    if not torch.cuda.is_available():
        return "needs a CUDA GPU, and torch finds none"
    device = torch.cuda.current_device()
    return capability_fault(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def capability_fault(name: str, capability: tuple[int, int]) -> str | None:
    """The same of a GPU that is older than any the kernels are compiled for."""
    if capability >= MIN_CAPABILITY:
        return None
    return (
        f"needs a GPU of compute capability {_version(MIN_CAPABILITY)} or later, and {name} has {_version(capability)}"
    )


def compute_dtype(stored: str, device: torch.device) -> torch.dtype:
    """The dtype of hidden states, for embeddings stored in ``stored``: the same, as far as the interpreter has it."""
    if stored not in _DTYPES:
        raise RecipeError(
            f"engine.backend: 'triton' computes in {', '.join(_DTYPES)}, and the embeddings are {stored}; "
            f"{OTHER_BACKENDS}"
        )
    dtype = _DTYPES[stored]
    return torch.float32 if dtype == torch.bfloat16 and device.type == "cpu" else dtype


def check_decoder(description: DecoderDescription) -> None:
    """RecipeError where a size is one that no kernel takes."""
    for norm in description.norms():
        check_size(norm.size)
    for layer in description.layers:
        _check_heads(layer.attention)


def check_room(folder: Path, needed: WeightBytes, device: torch.device, memory_utilization: float | None) -> None:
    """DataError where the weights are more than the share of the GPU's free memory that they may take."""
    if device.type == "cuda":
        check_fits(folder, needed, *torch.cuda.mem_get_info(device), memory_utilization)


def check_fits(
    folder: Path, needed: WeightBytes, free_bytes: int, total_bytes: int, memory_utilization: float | None
) -> None:
    """DataError where so many bytes are not to be had."""
    share = 1.0 if memory_utilization is None else memory_utilization
    usable_bytes = int(share * free_bytes)
    if needed.peak_bytes <= usable_bytes:
        return
    part = "" if memory_utilization is None else f", of which engine.memory_utilization {share} leaves {usable_bytes:,}"
    raise DataError(
        f"{folder}: the weights take {needed.held_bytes:,} bytes on the GPU and loading them {needed.loading_bytes:,} "
        f"more; of its {total_bytes:,} there are {free_bytes:,} free{part}; free some, or quantize to fewer bits"
    )


def no_room_for_kv(num_blocks: int, needed_bytes: int, free_bytes: int, total_bytes: int) -> DataError:
    """Why keys and values could not be given their memory."""
    return DataError(
        f"engine.kv_cache_memory: {num_blocks:,} KV blocks take {needed_bytes:,} bytes, and of the GPU's "
        f"{total_bytes:,} there are {free_bytes:,} free; lower it, or engine.memory_utilization or max_num_seqs"
    )


def no_room_for_graphs(max_num_seqs: int, error: torch.OutOfMemoryError) -> DataError:
    """Why decode steps could not be recorded."""
    reason = str(error).split("\n", maxsplit=1)[0]
    return DataError(
        f"engine.cuda_graphs: recording decodes of {max_num_seqs} sequences takes more memory than is left ({reason}); "
        "lower engine.max_num_seqs or what KV blocks take, or set cuda_graphs to false"
    )


def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; where kernels are interpreted, as if there were one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _check_heads(spec: AttentionSpec) -> None:
    if spec.head_dim % 2 or spec.head_dim > MAX_HEAD_DIM:
        raise RecipeError(
            f"engine.backend: 'triton' takes even head sizes up to {MAX_HEAD_DIM}, and the model's is {spec.head_dim}; "
            f"{OTHER_BACKENDS}"
        )
    group = spec.num_heads // spec.num_kv_heads
    if group > MAX_GROUP:
        raise RecipeError(
            f"engine.backend: 'triton' takes up to {MAX_GROUP} query heads per KV head, and the model has {group}; "
            f"{OTHER_BACKENDS}"
        )


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
