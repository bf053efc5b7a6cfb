"""Models that many tests share: the committed trained one, and random ones whose weights do not matter."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from architectures import MakeModel, save_model

from quantpipe.report import Reporter

# Processes that tests start load the same compiled kernels as they do: what is compiled twice takes twice as long.
os.environ.setdefault("QUANTPIPE_EMULATED_ISA", "1")

# How long a case takes says nothing on a machine that others share.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of every backend leave out Triton's kernels where there is neither a GPU nor Triton's interpreter."""
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return
    needing = [item for item in items if isinstance(item, pytest.Function) and _backend_of(item) == "triton"]
    if needing:
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in set(needing)]


def _backend_of(item: pytest.Function) -> object:
    """The ``backend`` that a test is parametrised with."""
    return item.callspec.params.get("backend") if hasattr(item, "callspec") else None


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """A trained 1.7M-parameter Llama in bfloat16: the only model here whose accuracy means something."""
    return Path(__file__).parent / "fixtures" / "tiny_llama"


@pytest.fixture(scope="session")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes folders of random Llamas (hidden 64, 2 layers, 4 heads over 2 KV heads) with config fields replaced."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
        settings: dict[str, Any] = {
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": True,
        }
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = LlamaForCausalLM(LlamaConfig(**settings | fields))
            for parameter in model.parameters():
                parameter.data.add_(torch.randn_like(parameter) * 0.05)
        folder = tmp_path_factory.mktemp("random_llama")
        model.to(dtype).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Gives the folder of a tiny random model of a family (see ``ARCHITECTURES``), made once for each set of fields."""
    made: dict[str, Path] = {}

    def folder_of(name: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
        key = f"{name} {dtype} {sorted(fields.items())}"
        if key not in made:
            made[key] = save_model(tmp_path_factory.mktemp(name), name, dtype, **fields)
        return made[key]

    return folder_of


@pytest.fixture(scope="session")
def add_kv_scales() -> Callable[[Path], Path]:
    """Gives a model folder static KV scales that cover the keys and values of random text, and returns it."""
    from safetensors.torch import save_file

    from quantpipe.backends.protocol import BatchInput
    from quantpipe.backends.reference import ReferenceBackend
    from quantpipe.backends.reference_kv_cache import ReferenceKVCache, ReferenceKVStore
    from quantpipe.formats.digests import KV_SCALES_NAME
    from quantpipe.formats.kv_rounding import static_scale
    from quantpipe.formats.kv_scales import KVScales

    def scales(stores: tuple[ReferenceKVStore, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(static_scale(store.codes.abs().amax((0, 1, 3))) for store in stores)

    def add(folder: Path, num_tokens: int = 128) -> Path:
        executor = ReferenceBackend().load(folder, 127.0, None)
        positions = torch.arange(num_tokens)
        token_ids = torch.randint(90, (num_tokens,), generator=torch.Generator().manual_seed(7))
        table, rows = torch.zeros(1, 1, dtype=torch.int64), positions[-1:]
        batch = BatchInput(token_ids, positions, positions, (num_tokens,), (num_tokens,), table, rows)
        kv: ReferenceKVCache = executor.allocate_kv_cache(1, num_tokens, "auto")
        executor.forward(batch, kv)
        save_file(KVScales(scales(kv.keys), scales(kv.values)).tensors(), folder / KV_SCALES_NAME)
        return folder

    return add


@pytest.fixture
def quiet() -> Reporter:
    """A reporter that prints nothing."""
    return Reporter(quiet=True)
