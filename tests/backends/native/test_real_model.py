"""On a real model the compiled kernels choose the reference's greedy tokens. Skipped unless a folder is given:

    QUANTPIPE_TEST_MODEL=/models/smollm2 python -m pytest tests/backends/native/test_real_model.py

Weights of a model stored in bfloat16 are the same numbers in float32, in which both sides compute.
"""

import os
from pathlib import Path

import pytest

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import SamplingParams
from quantpipe.engine.tokenizer import Tokenizer

MODEL = os.environ.get("QUANTPIPE_TEST_MODEL")
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Dear Ms Jones,\n\nThank you for your letter of",
    "Q: How many legs does a spider have?\nA:",
    "Once upon a time, in a village by the sea, there lived",
    "1, 1, 2, 3, 5, 8, 13,",
    "The three laws of thermodynamics state that",
    "El perro de mi vecino",
)
NEW_TOKENS = 64


def greedy(backend: str, folder: Path, prompts: list[list[int]]) -> tuple[list[tuple[int, ...]], tuple[str, ...]]:
    """The tokens of a backend, and what it has to say of itself."""
    engine = Engine.open(folder, EngineConfig(backend=backend, max_model_len=256, num_threads=1))
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    return [output.token_ids for output in engine.generate(prompts, params)], engine.backend_notes


@pytest.mark.slow
@pytest.mark.skipif(MODEL is None, reason="QUANTPIPE_TEST_MODEL names no model folder")
def test_greedy_tokens_of_a_real_model_are_those_of_the_reference() -> None:
    assert MODEL is not None
    tokenizer = Tokenizer.open(Path(MODEL))
    prompts = [list(tokenizer.encode(prompt, add_special_tokens=True)) for prompt in PROMPTS]
    found, notes = greedy("cpu", Path(MODEL), prompts)
    assert not [note for note in notes if note.startswith("torch operators")]
    expected, _ = greedy("reference", Path(MODEL), prompts)
    assert found == expected
