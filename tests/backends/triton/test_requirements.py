"""What cannot run is refused in one line that says what is supported. No GPU is needed to be refused."""

import dataclasses
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantpipe.backends.triton import TritonBackend, backend
from quantpipe.backends.triton.requirements import (
    capability_fault,
    check_decoder,
    check_fits,
    compute_dtype,
    no_room_for_graphs,
    no_room_for_kv,
)
from quantpipe.backends.triton.weight_bytes import WeightBytes
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.errors import DataError, RecipeError
from quantpipe.formats.artifact import Artifact
from quantpipe.models import describe
from quantpipe.models.description import DecoderDescription


@pytest.fixture
def described(random_llama: Callable[..., Path]) -> DecoderDescription:
    return describe(Artifact.open(random_llama()))


def with_heads(described: DecoderDescription, **fields: int) -> DecoderDescription:
    """The same decoder with other heads in its last layer."""
    *layers, last = described.layers
    changed = dataclasses.replace(last, attention=dataclasses.replace(last.attention, **fields))
    return dataclasses.replace(described, layers=(*layers, changed))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_machine_without_a_gpu_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(RecipeError, match=r"^engine\.backend: 'triton' needs a CUDA GPU.*'cpu'$"):
        Engine.open(tiny_llama, EngineConfig(backend="triton"))


def test_missing_triton_is_refused_with_what_to_install(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"^engine\.backend: 'triton' needs the package triton.*pip install"):
        TritonBackend().load(tiny_llama, 127.0, None)


def test_backends_are_listed_without_importing_triton() -> None:
    code = "import sys, quantpipe.backends; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert importlib.util.find_spec("triton") is not None


@pytest.mark.parametrize("capability", [(7, 5), (6, 1)])
def test_gpu_older_than_the_kernels_is_refused(capability: tuple[int, int]) -> None:
    fault = capability_fault("Tesla", capability) or ""
    assert fault.endswith(f"8.0 or later, and Tesla has {capability[0]}.{capability[1]}")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_gpu_that_kernels_are_compiled_for_is_taken(capability: tuple[int, int]) -> None:
    assert capability_fault("newer", capability) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 258}, "even head sizes up to 256, and the model's is 258"),
        ({"head_dim": 33}, "even head sizes up to 256, and the model's is 33"),
        ({"num_heads": 130, "num_kv_heads": 2}, "up to 64 query heads per KV head, and the model has 65"),
    ],
)
def test_heads_that_no_kernel_takes_are_refused(
    described: DecoderDescription, fields: dict[str, int], message: str
) -> None:
    check_decoder(described)
    with pytest.raises(RecipeError, match=message):
        check_decoder(with_heads(described, **fields))


def test_norm_that_no_kernel_takes_is_refused(described: DecoderDescription) -> None:
    wide = dataclasses.replace(described.final_norm, size=20_000)
    with pytest.raises(RecipeError, match="20000"):
        check_decoder(dataclasses.replace(described, final_norm=wide))


def test_weights_that_exceed_their_share_of_the_gpu_are_refused_before_they_are_loaded() -> None:
    needed = WeightBytes(held_bytes=900, loading_bytes=100)
    check_fits(Path("model"), needed, 1000, 4000, None)
    check_fits(Path("model"), needed, 2000, 4000, 0.5)
    with pytest.raises(DataError, match=r"model: the weights take 900 bytes .* 100 more; .* 4,000 .* 999 free; "):
        check_fits(Path("model"), needed, 999, 4000, None)
    with pytest.raises(DataError, match=r"1,998 free, of which engine.memory_utilization 0.5 leaves 999; free"):
        check_fits(Path("model"), needed, 1998, 4000, 0.5)


def test_memory_that_runs_out_is_told_in_one_line() -> None:
    blocks = str(no_room_for_kv(1000, 5_000_000, 4_000_000, 9_000_000))
    assert blocks.startswith("engine.kv_cache_memory: 1,000 KV blocks take 5,000,000 bytes, and of the GPU's 9,000,000")
    error = torch.OutOfMemoryError("CUDA out of memory. Tried 1 GiB.\nSee the documentation")
    graphs = str(no_room_for_graphs(64, error))
    assert graphs.startswith(
        "engine.cuda_graphs: recording decodes of 64 sequences takes more memory than is left (CUDA"
    )
    assert "\n" not in blocks + graphs


def test_gpu_computes_in_the_dtype_of_the_weights() -> None:
    gpu = torch.device("cuda")
    dtypes = {stored: compute_dtype(stored, gpu) for stored in ("F32", "F16", "BF16")}
    assert dtypes == {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    with pytest.raises(RecipeError, match=r"F32, F16, BF16, and the embeddings are F8_E4M3"):
        compute_dtype("F8_E4M3", gpu)
