"""A whole release candidate of the tiny trained model: recipe, questions, and one finished run that tests share."""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from quantpipe import cli

SUITE = """
version: 1
name: tiny
tasks:
  - {task: tiny_choice, metric: acc, num_items: 24}
"""

TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: items.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: prompt
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""

RECIPE = """
version: 1
name: tiny
model: {model}
quantize:
  solver: rtn
  scheme: w8a8
  kv_cache: int8_per_token_head
engine: {{num_threads: 1, max_model_len: 512}}
evaluate:
  suite: suite
  divergence: {{text: held_out, num_windows: 8, window_tokens: 128}}
bench: {{concurrency: [1], prompt_tokens: 16, new_tokens: 4, repeats: 2}}
gate:
  perplexity_ratio: {{max: 1.02}}
  mean_kl: {{max: 0.005}}
  accuracy_loss_points: {{max: 60}}
output: run
"""

# What a model that read the standard library expects after each beginning, against three it does not.
ITEMS = (
    ("import ", "os", ("?", "))", "]")),
    ("def __init__(", "self", ("return", "0", "**")),
    ("    raise ValueError", "(", (")", "]", "=")),
    ("for i in range", "(", ("]", ":", ".")),
    ("from typing import", " ", (")", "]", "=")),
    ("if __name__ == ", '"', ("]", "}", ":")),
)


@pytest.fixture(scope="session")
def make_project(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Callable[[], Path]:
    """Makes folders with recipe.yaml, a suite and held-out text for the tiny model."""
    import heapq
    import json.decoder as decoder

    def make() -> Path:
        folder = tmp_path_factory.mktemp("project")
        (folder / "suite").mkdir()
        (folder / "held_out").mkdir()
        (folder / "suite" / "suite.yaml").write_text(SUITE)
        (folder / "suite" / "task.yaml").write_text(TASK)
        rows = []
        for number in range(24):
            prompt, right, wrong = ITEMS[number % len(ITEMS)]
            row = {"id": f"item-{number}", "domain": "code", "cluster": f"cluster-{number}", "label": 0}
            rows.append(json.dumps(row | {"prompt": f"x = {number}\n{prompt}", "choices": [right, *wrong]}))
        (folder / "suite" / "items.jsonl").write_text("\n".join(rows) + "\n")
        for module in (decoder, heapq, textwrap):
            text = Path(str(module.__file__)).read_text(encoding="utf-8")
            (folder / "held_out" / f"{module.__name__}.txt").write_text(text)
        (folder / "recipe.yaml").write_text(RECIPE.format(model=tiny_llama))
        return folder

    return make


@pytest.fixture(scope="session")
def finished(make_project: Callable[[], Path]) -> Path:
    """A project whose recipe has been run, and passed."""
    folder = make_project()
    assert cli.run(["run", str(folder / "recipe.yaml"), "--quiet"]) == 0
    return folder
