"""``quantpipe rescore``: answers in, scores out, no model in between."""

from pathlib import Path

import pytest

from quantpipe.cli import run
from quantpipe.errors import EXIT_DATA
from quantpipe.evaluate.outputs import write_outputs
from quantpipe.evaluate.suite import load_suite, run_suite
from quantpipe.gate.record import OUTPUTS_NAMES
from tests.evaluate.conftest import BigramEngine, CharCodec, speaking_table
from tests.evaluate.test_short_run import CHOICE, EXACT, ROWS, knowing_engine
from tests.evaluate.test_short_task import write_suite

RECIPE = "version: 1\nname: r\nmodel: {source: model}\nevaluate: {suite: support.yaml}\noutput: out\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    suite = load_suite(write_suite(tmp_path, CHOICE, EXACT, rows=ROWS))
    engines = {"baseline": knowing_engine(), "candidate": BigramEngine(speaking_table("axy\n"))}
    for role, name in OUTPUTS_NAMES.items():
        write_outputs(tmp_path / "out" / name, suite, role, run_suite(engines[role], CharCodec(), suite))
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE)
    return file


def test_both_models_are_scored_by_task_and_compared(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rescore", str(recipe)]) == 0
    first, second, loss = capsys.readouterr().out.splitlines()
    assert first == "letters: 3 items, baseline 66.7 %, candidate 33.3 %"
    assert second == "says: 3 items, baseline 66.7 %, candidate 33.3 %"
    assert loss.startswith("accuracy_loss_points: 33.33 [")
    (recipe.parent / "intents.csv").write_text(ROWS.replace("bc", "xy"))
    assert run(["rescore", str(recipe), "--outputs", str(recipe.parent / "out")]) == 0
    assert "letters: 3 items, baseline 0.0 %, candidate 100.0 %" in capsys.readouterr().out


def test_without_answers_or_with_other_questions_there_is_one_line(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["rescore", str(recipe), "--outputs", str(recipe.parent)]) == EXIT_DATA
    assert "outputs-baseline.jsonl: cannot be read" in capsys.readouterr().err
    write_suite(recipe.parent, CHOICE | {"prompt": "{{ q }}!"}, rows=ROWS)
    assert run(["rescore", str(recipe)]) == EXIT_DATA
    assert "was asked something else" in capsys.readouterr().err
