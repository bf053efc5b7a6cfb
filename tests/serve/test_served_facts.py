"""What is shown of a folder: its schemes, and a verdict only if it is about these very files and settings."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from quantpipe.engine.config import EngineConfig
from quantpipe.errors import ArtifactError
from quantpipe.formats.artifact import Artifact
from quantpipe.gate.judge import Measurement, judge
from quantpipe.gate.limits import Limit
from quantpipe.gate.record import RunContext, write_gate_json
from quantpipe.serve.served_facts import FactsReader, gate_facts, served_facts

GOLDEN = Path(__file__).parents[1] / "golden"
SETTINGS = {
    "backend": "cpu",
    "kv_dtype": "auto",
    "activations": "int16",
    "activation_divisor": 127.0,
    "window_tokens": None,
    "sink_tokens": 0,
}


@pytest.fixture
def judged(tmp_path: Path) -> Path:
    """An artifact with its verdict beside it, as a run leaves them."""
    folder = tmp_path / "run" / "artifact"
    shutil.copytree(GOLDEN / "w8a8", folder)
    settings = SETTINGS | {"kv_dtype": Artifact.open(folder).kv_cache}
    context = RunContext("legal", "ab" * 32, Artifact.open(folder).digest, "c", "d", settings, {}, {}, "2026-01-01")
    result = judge({"mean_kl": Limit(max=0.05)}, [Measurement("mean_kl", 0.03, 0.02, 0.04, 0.9, 16, "nats")])
    write_gate_json(folder.parent / "gate.json", result, context)
    return folder


def test_schemes_and_kv_mode_are_the_folders_unless_the_config_says_otherwise() -> None:
    facts = served_facts(GOLDEN / "w8a8", EngineConfig())
    assert (facts.artifact, facts.kv_cache) == ("w8a8", Artifact.open(GOLDEN / "w8a8").kv_cache)
    assert sum(facts.schemes.values()) == len(Artifact.open(GOLDEN / "w8a8").schemes) > 0
    assert all(name.startswith("w8a8") for name in facts.schemes)
    assert served_facts(GOLDEN / "w8a8", EngineConfig(kv_dtype="int4_per_token_head")).kv_cache == "int4_per_token_head"
    with pytest.raises(ArtifactError):
        served_facts(GOLDEN / "none", EngineConfig())


def test_verdict_is_shown_with_its_recipe_and_what_is_served_otherwise(judged: Path) -> None:
    gate = gate_facts(judged, EngineConfig())
    assert gate is not None
    assert (gate.verdict, gate.recipe, gate.recipe_digest, gate.date) == ("PASS", "legal", "ab" * 32, "2026-01-01")
    assert gate.served_otherwise == ()
    otherwise = gate_facts(judged, EngineConfig(kv_dtype="int4_per_token_head", activations="int8", max_num_seqs=3))
    assert otherwise is not None and otherwise.served_otherwise == ("kv_dtype", "activations")


def test_verdict_on_other_files_or_damaged_or_absent_is_no_verdict(judged: Path) -> None:
    config = judged / "config.json"
    config.write_text(config.read_text() + "\n")
    assert gate_facts(judged, EngineConfig()) is None
    (judged.parent / "gate.json").write_text("{")
    assert gate_facts(judged, EngineConfig()) is None
    (judged.parent / "gate.json").unlink()
    assert gate_facts(judged, EngineConfig()) is None


def test_reader_knows_the_verdict_a_little_later(judged: Path) -> None:
    reader = FactsReader(judged, {})
    assert reader.read().gate is None
    reader.look_for_verdict()
    deadline = time.monotonic() + 10
    while reader.read().gate is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert replace(reader.read(), gate=None) == served_facts(judged, EngineConfig())
