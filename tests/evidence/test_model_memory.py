"""Bytes of a model: what is stored, by scheme, and what an engine takes."""

from pathlib import Path

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.evidence.model_memory import memory_row, stored_bytes
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.weight_file import read_header

GOLDEN = Path(__file__).parents[1] / "golden" / "w8a8"


def test_stored_bytes_add_up_to_the_file() -> None:
    found = stored_bytes(Artifact.open(GOLDEN))
    file = GOLDEN / "model.safetensors"
    header_bytes = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert sum(found.values()) == file.stat().st_size - header_bytes
    assert found["w8a8"] > 0
    assert len(read_header(file)) > 0


def test_an_engine_tells_bytes_per_token_of_its_mode(tiny_llama: Path) -> None:
    config = EngineConfig(num_threads=1, max_model_len=64, max_num_seqs=1)
    engines = [
        Engine.open(tiny_llama, config),
        Engine.open(
            tiny_llama, EngineConfig(num_threads=1, max_model_len=64, max_num_seqs=1, kv_dtype="int8_per_token_head")
        ),
    ]
    plain, small = (memory_row("baseline", tiny_llama, engine) for engine in engines)
    assert plain.kv_bytes_per_token > 2 * small.kv_bytes_per_token > 0
    assert sum(plain.stored.values()) == sum(small.stored.values())
    assert plain.kv_cache_bytes >= 64 * plain.kv_bytes_per_token
