"""The row ``cpu`` takes the compiled kernels where it can, and otherwise torch's operators, saying why."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from quantpipe.backends.cpu import CpuBackend
from quantpipe.backends.cpu.executor import CpuExecutor
from quantpipe.backends.cpu.native import library
from quantpipe.backends.cpu.native.build import BuildError, find_compiler
from quantpipe.backends.cpu.native.executor import NativeExecutor
from quantpipe.backends.cpu.native.library import NativeError, load_library
from quantpipe.backends.protocol import BatchInput, Executor
from quantpipe.backends.reference import ReferenceBackend
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine

MakeFolder = Callable[..., Path]
MakeBatch = Callable[..., BatchInput]


def load(folder: Path) -> Executor:
    return CpuBackend().load(folder, 127.0, None)


@pytest.fixture
def needs_library() -> None:
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    load_library()


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail() -> Path:
        raise BuildError("no C++ compiler was found; install one")

    monkeypatch.setattr(library, "library_path", fail)
    library._find_library.cache_clear()
    yield
    library._find_library.cache_clear()


@pytest.mark.usefixtures("needs_library")
def test_compiled_kernels_come_first(make_folder: MakeFolder) -> None:
    executor = load(make_folder())
    assert isinstance(executor, NativeExecutor)
    assert not any("torch operators" in note for note in executor.notes)


@pytest.mark.usefixtures("no_library")
def test_without_a_library_torch_runs_the_model_and_says_why(make_folder: MakeFolder) -> None:
    executor = load(make_folder())
    assert isinstance(executor, CpuExecutor)
    assert executor.notes[0] == "torch operators, slower: no C++ compiler was found; install one"


@pytest.mark.usefixtures("needs_library")
def test_a_model_that_the_kernels_cannot_run_runs_on_torch(make_folder: MakeFolder, make_batch: MakeBatch) -> None:
    folder = make_folder(head_dim=20)
    executor = load(folder)
    assert isinstance(executor, CpuExecutor)
    assert executor.notes[0].startswith("torch operators, slower: ") and "20" in executor.notes[0]
    batch = make_batch([([1, 2, 3], 0, [0])], 4)
    expected = ReferenceBackend().load(folder, 127.0, None)
    found_RV, expected_RV = (own.forward(batch, own.allocate_kv_cache(1, 4, "auto")) for own in (executor, expected))
    torch.testing.assert_close(found_RV, expected_RV, rtol=0, atol=5e-5)


@pytest.mark.usefixtures("needs_library")
@pytest.mark.parametrize(("block_size", "is_slower"), [(16, False), (32, False), (8, True), (20, True)])
def test_kv_blocks_that_attention_cannot_take_whole_are_noted(
    make_folder: MakeFolder, block_size: int, is_slower: bool
) -> None:
    notes = Engine.open(make_folder(), EngineConfig(block_size=block_size)).backend_notes
    assert any(f"KV blocks of {block_size} tokens" in note for note in notes) == is_slower


@pytest.mark.usefixtures("needs_library")
def test_a_step_that_reaches_beyond_the_cache_is_refused(make_folder: MakeFolder, make_batch: MakeBatch) -> None:
    executor = load(make_folder())
    kv_cache = executor.allocate_kv_cache(1, 4, "auto")
    with pytest.raises(NativeError):
        executor.forward(make_batch([([1, 2, 3], 0, [5])], 4), kv_cache)


@pytest.mark.usefixtures("needs_library")
def test_another_backends_cache_is_refused(make_folder: MakeFolder, make_batch: MakeBatch) -> None:
    executor = load(make_folder())
    other = ReferenceBackend().load(make_folder(), 127.0, None).allocate_kv_cache(1, 4, "auto")
    with pytest.raises(TypeError, match="was given a ReferenceKVCache"):
        executor.forward(make_batch([([1], 0, [0])], 4), other)


@pytest.mark.usefixtures("needs_library")
def test_copied_blocks_hold_what_their_sources_held(make_folder: MakeFolder, make_batch: MakeBatch) -> None:
    executor = load(make_folder())
    kv_cache = executor.allocate_kv_cache(4, 4, "int8_per_token_head")
    executor.forward(make_batch([([1, 2, 3, 4], 0, [0]), ([5, 6, 7, 8], 0, [1])], 4), kv_cache)
    kv_cache.copy_blocks([(0, 2), (1, 0)])  # the first source is a later destination
    found, expected = (executor.forward(make_batch([([9], 4, [block, 3])], 4), kv_cache) for block in (2, 0))
    fresh = executor.allocate_kv_cache(4, 4, "int8_per_token_head")
    executor.forward(make_batch([([1, 2, 3, 4], 0, [0]), ([5, 6, 7, 8], 0, [1])], 4), fresh)
    wanted = [executor.forward(make_batch([([9], 4, [block, 3])], 4), fresh) for block in (0, 1)]
    assert torch.equal(torch.cat([found, expected]), torch.cat(wanted))
    kv_cache.copy_blocks([])


@pytest.mark.usefixtures("needs_library")
@pytest.mark.parametrize("nan_token", [None, 5])
def test_greedy_tokens_are_where_logits_are_largest(
    nan_token: int | None, make_folder: MakeFolder, make_batch: MakeBatch
) -> None:
    executor = load(make_folder(nan_token=nan_token))
    batch = make_batch([([1, 2, 3], 0, [0]), ([5, 6], 0, [1])], 4)
    logits = executor.forward(batch, executor.allocate_kv_cache(2, 4, "auto"))
    found = executor.forward_greedy(batch, executor.allocate_kv_cache(2, 4, "auto")).tolist()
    expected = [int(row.argmax()) if bool(row.isfinite().all()) else -1 for row in logits]
    assert found == expected
    assert (-1 in found) == (nan_token is not None)


@pytest.mark.usefixtures("needs_library")
def test_the_time_of_every_part_is_kept(make_folder: MakeFolder, make_batch: MakeBatch) -> None:
    executor = load(make_folder())
    before = executor.step_times_s
    executor.forward(make_batch([([1, 2, 3], 0, [0])], 4), executor.allocate_kv_cache(1, 4, "auto"))
    after = executor.step_times_s
    assert all(after[part] >= before[part] for part in before) and after["head"] > before["head"]


@pytest.mark.usefixtures("needs_library")
def test_memory_is_given_back(make_folder: MakeFolder) -> None:
    executor = load(make_folder())
    owned = executor.plan._owned  # type: ignore[attr-defined]
    assert owned.linears and owned.plan
    del executor
    assert not owned.linears and owned.plan is None
