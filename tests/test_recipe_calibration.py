"""A recipe's calibration set against what the recipe evaluates on: no row and no customer on both sides."""

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantpipe.calibration.calibration_set import CalibrationSet
from quantpipe.errors import DataError
from quantpipe.formats.artifact import Artifact
from quantpipe.judgement import read_texts
from quantpipe.recipe.schema import Recipe
from quantpipe.recipe_calibration import calibrate
from quantpipe.report import Reporter
from quantpipe.sources.base_model import BaseModel

QUESTION = "Why was a fee added to the payment that I made abroad last week?"


def ticket(number: int) -> tuple[str, str]:
    """A customer, and a text of its own random words."""
    generator = random.Random(number)
    words = ("".join(generator.choices("aeioulmnrst", k=6)) for _ in range(20))
    return f"c{number % 25}", " ".join(words)


@pytest.fixture
def tickets(tmp_path: Path) -> Path:
    """100 rows of 25 customers. Rows 40 and 41 of the file hold an evaluated question; c7 is an evaluated customer."""
    rows = [ticket(number) for number in range(100)]
    rows[38] = ("c90", QUESTION.upper())
    rows[39] = ("c91", f"Hello. {QUESTION} Thank you.")
    with (tmp_path / "tickets.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("customer", "text"), *rows])
    return tmp_path / "tickets.csv"


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    folder = tmp_path / "evals"
    folder.mkdir()
    task = {
        "task": "fees",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "items.jsonl"}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "question",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    }
    item = {"domain": "fees", "cluster": "fees", "choices": ["Yes", "No"], "label": 0}
    items = [
        item | {"id": "1", "question": "Is the exchange rate of a weekend that of the Friday before?", "group": "c7"},
        item | {"id": "2", "question": QUESTION},
    ]
    tasks = [{"task": "fees", "metric": "acc", "num_items": 2}]
    (folder / "suite.yaml").write_text(json.dumps({"version": 1, "name": "fees", "tasks": tasks}))
    (folder / "fees.yaml").write_text(json.dumps(task))
    (folder / "items.jsonl").write_text("".join(json.dumps(each) + "\n" for each in items))
    return folder


@pytest.fixture
def make(tiny_llama: Path, tickets: Path, suite: Path) -> Callable[..., Recipe]:
    """A recipe with the tickets as its set, and with fields of its sections replaced."""

    def recipe(
        calibrated: dict[str, Any] | None = None,
        holdout: dict[str, Any] | None = None,
        solver: str = "gptq",
        **evaluated: Any,
    ) -> Recipe:
        source = {"path": str(tickets), "group": "customer", "max_group_frac": 0.5}
        tickets_set = {"name": "tickets", "sources": [source], "holdout": holdout}
        section = {"set": tickets_set, "num_sequences": 4, "sequence_length": 64} | (calibrated or {})
        return Recipe.model_validate(
            {
                "version": 1,
                "name": "tiny",
                "model": {"source": str(tiny_llama)},
                "quantize": {"solver": {"name": solver}, "scheme": {"name": "w4a16", "group_size": 64}},
                "calibration": section,
                "evaluate": {"suite": suite, **evaluated},
                "gate": {"mean_kl": {"max": 0.1}},
                "output": tickets.parent / "out",
            }
        )

    return recipe


@pytest.fixture
def build(tiny_llama: Path, quiet: Reporter) -> Callable[[Recipe], CalibrationSet | None]:
    """What a run does before it quantizes."""
    base = BaseModel(tiny_llama, str(tiny_llama), Artifact.open(tiny_llama).digest, is_dequantized=False)
    return lambda recipe: calibrate(recipe, base, read_texts(recipe, tiny_llama), quiet)


Make = Callable[..., Recipe]
Build = Callable[[Recipe], CalibrationSet | None]
HELD_OUT = {"divergence": {"holdout": True, "num_windows": 4, "window_tokens": 64}}


def test_leaked_rows_and_customers_are_refused_with_rows_of_both_sides(make: Make, build: Build, suite: Path) -> None:
    with pytest.raises(DataError) as refused:
        build(make())
    message = str(refused.value)
    assert f"calibration set tickets: 6 rows overlap {suite} (1 exact, 1 near, 4 group): " in message
    for pair in ("tickets.csv:40 = items.jsonl:2", "tickets.csv:41 = items.jsonl:2", "tickets.csv:9 = items.jsonl:1"):
        assert pair in message
    assert message.endswith("remove them or set calibration.on_leakage: drop")
    assert "\n" not in message
    assert "abroad" not in message.lower()  # nothing of what a row says


def test_leaked_rows_may_be_dropped_and_are_counted(make: Make, build: Build) -> None:
    built = build(make({"on_leakage": "drop"}))
    assert built is not None
    assert built.account[0].dropped["leaked"] == 6
    assert {"40", "41"}.isdisjoint(document.where.rsplit(":", 1)[1] for document in built.documents)


@pytest.mark.parametrize("salt", ["a", "b"])
def test_no_customer_is_both_calibrated_on_and_evaluated_on(
    make: Make, build: Build, tickets: Path, tiny_llama: Path, salt: str
) -> None:
    with tickets.open(newline="") as file:
        customer_of = {f"{number}": row["customer"] for number, row in enumerate(csv.DictReader(file), start=2)}
    recipe = make({"on_leakage": "drop"}, {"frac": 0.4, "salt": salt}, **HELD_OUT)
    built = build(recipe)
    assert built is not None
    assert built.account[0].dropped["held out"] > 10
    texts = read_texts(recipe, tiny_llama)
    evaluated = {customer_of[text.row.rsplit(":", 1)[1]] for text in texts if text.is_held_out}
    calibrated = {customer_of[document.where.rsplit(":", 1)[1]] for document in built.documents}
    assert evaluated and calibrated
    assert calibrated.isdisjoint(evaluated | {"c7"})


def test_set_that_only_the_evaluation_reads_is_not_built(make: Make, build: Build) -> None:
    assert build(make(holdout={"frac": 0.4}, solver="rtn", **HELD_OUT)) is None
