"""Stored results are judged again without a model, by other limits, and by nothing else than what they are of."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from read_windows import windows
from suite_items import flipped

from quantpipe import cli
from quantpipe.errors import DataError, RecipeError
from quantpipe.evaluate.comparison import Comparison
from quantpipe.formats.digests import MANIFEST_NAME, artifact_digest, file_digest
from quantpipe.gate.judge import Verdict
from quantpipe.gate.record import RunContext, read_gate_json
from quantpipe.gate.report import ParityRow
from quantpipe.recipe.schema import Recipe, load_recipe
from quantpipe.reporting.report import ReportParts
from quantpipe.reporting.sections.facts import parity_section
from quantpipe.verdict.rejudge import rejudge, source_of
from quantpipe.verdict.results import Results
from quantpipe.verdict.stored import StoredRun, read_results, write_results

GOLDEN = Path(__file__).parents[1] / "golden"
RECIPE = """\
version: 1
name: tiny
model: base
evaluate:
  suite: suite
  divergence: {text: text.txt, num_windows: 8}
gate:
  - {metric: accuracy, max_drop_points: 4}
  - {metric: mean_kl, at_most: 0.05}
output: run
"""
GERMAN = flipped(200, 6, slices={"language": "de"}, margin=0.01)
RESULTS = Results(
    comparison=Comparison(GERMAN.pairs + flipped(300, 1, 2, task="order", slices={"language": "en"}).pairs),
    windows=windows(8, fields={"domain": "letters"}),
    bench={"ttft_ratio_c1": ((1.0, 1.1), (1.0, 1.12))},
    num_items=500,
    num_windows=8,
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A recipe whose run is over: its artifact and its results, without a verdict."""
    for name, text in (("suite/suite.yaml", "x"), ("text.txt", "words"), ("base/config.json", "{}")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "r.yaml").write_text(RECIPE)
    shutil.copytree(GOLDEN / "w8a8", tmp_path / "run" / "artifact")
    store(load_recipe(tmp_path / "r.yaml"), RESULTS)
    return tmp_path


def store(recipe: Recipe, results: Results) -> StoredRun:
    artifact = recipe.output / "artifact"
    context = RunContext(
        "old name", "ab" * 32, artifact_digest(artifact), "cd" * 32, "base", {}, {}, {}, "2026-01-01",
        manifest_digest=file_digest(artifact / MANIFEST_NAME), measured="2026-01-01",
    )  # fmt: skip
    parity = parity_section((ParityRow("a == b", float("nan"), 1e-3),))
    run = StoredRun(results, source_of(recipe, artifact), ReportParts(context, ("a note",), (parity,)))
    write_results(recipe.output, run)
    return run


def loaded(project: Path, *overrides: str, old: str = "", new: str = "") -> Recipe:
    (project / "r.yaml").write_text(RECIPE.replace(old, new) if old else RECIPE)
    return load_recipe(project / "r.yaml", overrides)


def test_results_survive_the_disk_without_what_was_answered(project: Path) -> None:
    stored = read_results(project / "run").results
    assert list(stored.measurements()) == list(RESULTS.measurements())
    assert stored.comparison is not None and RESULTS.comparison is not None
    assert stored.comparison.num_near_ties == RESULTS.comparison.num_near_ties == 6
    assert stored.comparison.num_changed == RESULTS.comparison.num_changed
    assert stored.comparison.pairs[0][0].slices == {"language": "de"}
    text = (project / "run" / "items.jsonl").read_text() + (project / "run" / "measurements.json").read_text()
    assert "answer" not in text and "scores 1.0" not in text


def test_other_limits_give_another_verdict_on_record_and_in_the_report(project: Path) -> None:
    assert rejudge(loaded(project)).verdict is Verdict.PASS
    tight = loaded(project, old="at_most: 0.05", new="at_most: 0.01")
    assert rejudge(tight).verdict is Verdict.FAIL
    result, context = read_gate_json(project / "run" / "gate.json")
    assert (result.verdict, context.recipe_digest, context.measured) == (Verdict.FAIL, tight.digest, "2026-01-01")
    assert context.date > context.measured
    report = (project / "run" / "report.md").read_text()
    assert report.startswith("# tiny: FAIL") and "a note" in report and "| a == b | nan |" in report
    assert "| i0 | intent |" in report  # a flip, by name


def test_a_slice_may_be_limited_that_was_not_when_it_ran(project: Path) -> None:
    limit = "  - {metric: accuracy, max_drop_points: 1, slice: {language: de}}\noutput"
    result = rejudge(loaded(project, old="output", new=limit))
    assert [check.verdict for check in result.checks] == [Verdict.PASS, Verdict.PASS, Verdict.FAIL]
    report = (project / "run" / "report.md").read_text()
    assert "| language=de | 200 | 200 | 194 | 6 | 0 | 6 | 6 | 0.03125 | 97 % (" in report


def test_a_slice_of_held_out_text_may_be_limited_that_was_not_when_it_ran(project: Path) -> None:
    limit = "  - {metric: mean_kl, at_most: 0.01, slice: {domain: letters}}\noutput"
    check = rejudge(loaded(project, old="output", new=limit)).checks[2]
    assert (check.metric, check.verdict) == ("mean_kl[domain=letters]", Verdict.FAIL)
    result, _ = read_gate_json(project / "run" / "gate.json")
    assert result.checks[2].entry.slice == {"domain": "letters"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: loaded(p, old="model: base", new="model: base\nbench: {}"), r"r\.yaml:4:8: bench: changed since"),
        (lambda p: loaded(p, "engine.max_num_seqs=3"), "--set engine.max_num_seqs|engine: changed since"),
        (lambda p: loaded(p, old="num_windows: 8", new="num_windows: 9"), r"r\.yaml:5:3: evaluate: changed since"),
        (
            lambda p: [(p / "suite" / "items.jsonl").write_text("x"), loaded(p)][1],
            r"r\.yaml:5:10: evaluate.suite: changed",
        ),
        (lambda p: [(p / "text.txt").write_text("x"), loaded(p)][1], r"evaluate.divergence.text: changed"),
        (
            lambda p: [(p / "run" / "artifact" / "config.json").write_text("{}"), loaded(p)][1],
            "is not the artifact that the results",
        ),
        (lambda p: [(p / "run" / "measurements.json").unlink(), loaded(p)][1], "run the recipe first"),
        (lambda p: [(p / "run" / "measurements.json").write_text("{}"), loaded(p)][1], "no results of a run"),
        (lambda p: [(p / "run" / "items.jsonl").write_text(""), loaded(p)][1], "items.jsonl is of another run"),
        (
            lambda p: loaded(p, old="output", new="  - {metric: accuracy, max_drop_points: 1, task: faq}\noutput"),
            r"r\.yaml:10:50: gate\[2\]\.task: no item is of task 'faq' \(known: intent, order\)",
        ),
        (
            lambda p: loaded(p, old="output", new="  - {metric: p99_kl, at_most: 1, slice: {domain: mail}}\noutput"),
            r"r\.yaml:10:41: gate\[2\]\.slice: no window has domain 'mail' \(its values: letters\)",
        ),
    ],
)
def test_results_of_anything_else_are_refused_in_one_line(
    project: Path, change: Callable[[Path], Recipe], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from quantpipe.recipe.lines import naming_lines

    recipe = change(project)
    with pytest.raises((DataError, RecipeError), match=message) as caught, naming_lines(recipe):
        rejudge(recipe)
    assert "\n" not in str(caught.value)
    assert not (project / "run" / "gate.json").exists()


def test_metric_that_was_not_measured_is_refused_at_its_key(project: Path) -> None:
    store(loaded(project), replace(RESULTS, windows=(), num_windows=0))
    with pytest.raises(RecipeError, match=r"gate\[1\]\.metric: mean_kl was not measured when the recipe ran"):
        rejudge(loaded(project))


def test_artifact_that_was_only_touched_is_the_same(project: Path) -> None:
    (project / "run" / "artifact" / "config.json").touch()
    assert rejudge(loaded(project)).verdict is Verdict.PASS


def test_command_judges_without_importing_what_runs_models(project: Path) -> None:
    code = (
        "import sys; from quantpipe import cli; code = cli.run(sys.argv[1:]);"
        "print([m for m in ('torch', 'transformers', 'lm_eval', 'scipy.stats') if m in sys.modules]); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "gate", str(project / "r.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert "PASS: report in" in done.stdout
    assert json.loads((project / "run" / "gate.json").read_text())["context"]["recipe_name"] == "tiny"


@pytest.fixture
def released(project: Path) -> Iterator[Recipe]:
    """The project with an earlier release in ``old``, which it is compared with."""
    assert rejudge(loaded(project)).verdict is Verdict.PASS
    shutil.copytree(project / "run", project / "old")
    limit = "  - {metric: accuracy, max_drop_points: 2, vs: previous-release}\nprevious_release: old\noutput"
    yield loaded(project, old="output", new=limit)


def test_earlier_release_is_what_its_limit_is_against(released: Recipe) -> None:
    check = rejudge(released).checks[2]
    assert (check.verdict, check.entry.scope) == (Verdict.PASS, "vs previous-release")
    assert check.measurement is not None and check.measurement.value == 0.0


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("gate.json", '"verdict": "PASS"', '"verdict": "FAIL"', "does not follow"),
        ("measurements.json", '"quantpipe.measurements/2"', '"x"', "no results of a run"),
        ("items.jsonl", "", "", "cannot be read"),
    ],
)
def test_earlier_release_that_is_none_is_refused(released: Recipe, name: str, old: str, new: str, message: str) -> None:
    assert released.previous_release is not None
    file = released.previous_release / name
    if old:
        file.write_text(file.read_text().replace(old, new, 1))
    else:
        file.unlink()
    with pytest.raises(DataError, match=f"^previous_release: .*{message}"):
        rejudge(released)


def test_earlier_release_that_failed_or_was_asked_otherwise_is_refused(project: Path, released: Recipe) -> None:
    before = read_results(project / "old")
    assert before.results.comparison is not None
    fewer = Comparison(before.results.comparison.pairs[1:])
    write_results(project / "old", replace(before, results=replace(before.results, comparison=fewer)))
    with pytest.raises(
        DataError, match=r"previous_release: .*old has no result of item intent/i0; judge that artifact"
    ):
        rejudge(released)
    failing = load_recipe(project / "r.yaml", ["gate=[{metric: mean_kl, at_most: 0.001}]", "previous_release=null"])
    assert rejudge(failing).verdict is Verdict.FAIL
    shutil.copy(project / "run" / "gate.json", project / "old" / "gate.json")
    with pytest.raises(DataError, match=r"the verdict in .*old is FAIL; give a release that passed"):
        rejudge(released)


def test_exit_codes_of_the_command_are_those_of_a_run(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded(project)
    assert cli.run(["gate", str(project / "r.yaml")]) == 0
    assert cli.run(["gate", str(project / "r.yaml"), "--set", "gate={mean_kl: {at_most: 0.001}}"]) == 4
    assert cli.run(["gate", str(project / "r.yaml"), "--set", "gate={mean_kl: {at_most: 0.024}}"]) == 5
    capsys.readouterr()
    assert cli.run(["gate", str(project / "r.yaml"), "--set", "bench={}"]) == 2
    assert capsys.readouterr().err.startswith("--set bench: changed since")


def test_power_comes_from_the_stored_flips(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limit = "  - {metric: accuracy, max_drop_points: 1, slice: {language: de}}\noutput"
    loaded(project, old="output", new=limit)
    assert cli.run(["gate", str(project / "r.yaml"), "--power"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("accuracy_loss_points <= 4: margin 4 points, n = 500: enough; fails losses of")
    assert lines[1].startswith("mean_kl <= 0.05: n = 8, 0.0235 measured last: enough")
    assert "(language=de) <= 1: margin 1 point, n = 200: cannot pass, even without a flip; needs about" in lines[2]
    assert "3 % discordant" in lines[2]
    assert cli.run(["gate", str(project / "r.yaml"), "--power", "--artifact", "x"]) == 2
