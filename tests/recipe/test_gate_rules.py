"""A gate that is a list: both forms read alike, and every mistake stands at its line and column."""

from pathlib import Path

import pytest

from quantpipe.errors import RecipeError
from quantpipe.gate.limits import Limit
from quantpipe.recipe.schema import Recipe, load_recipe

RECIPE = """\
version: 1
name: legal
model: owner/name
evaluate:
  suite: suite
  divergence: {text: text.txt}
bench: {}
output: out
gate:
"""
DROP = "- {metric: accuracy, max_drop_points: 2"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "suite.yaml").touch()
    (tmp_path / "text.txt").touch()
    return tmp_path


def load(folder: Path, gate: str, more: str = "") -> Recipe:
    (folder / "r.yaml").write_text(RECIPE + gate + "\n" + more)
    return load_recipe(folder / "r.yaml")


def test_list_and_mapping_give_limits(folder: Path) -> None:
    listed = load(folder, f"{DROP}}}\n- {{metric: mean_kl, at_most: 0.05, on_unsure: warn}}", "correction: holm").limits
    assert [(entry.figure, entry.limit, entry.on_unsure) for entry in listed] == [
        ("accuracy_loss_points", Limit(max=2), "block"),
        ("mean_kl", Limit(max=0.05), "warn"),
    ]
    mapped = load(folder, "  mean_kl: {at_most: 0.05}\n  top1_agreement: {min: 0.9}").limits
    assert [(entry.figure, entry.limit) for entry in mapped] == [
        ("mean_kl", Limit(max=0.05)),
        ("top1_agreement", Limit(min=0.9)),
    ]


def test_one_metric_may_be_limited_for_several_slices_tasks_and_opponents(folder: Path) -> None:
    gate = (
        f"{DROP}}}\n{DROP}, slice: {{language: de}}, min_items: 100}}\n{DROP}, slice: {{language: en}}}}\n"
        f"{DROP}, task: intent}}\n{DROP}, vs: previous-release}}\n- {{metric: accuracy, max_drop_relative: 0.03}}\n"
        "- {metric: accuracy, vs: absolute, at_least: 0.8}"
    )
    assert len(load(folder, gate, "previous_release: ../old").limits) == 7


def test_waiver_reads_with_its_day(folder: Path) -> None:
    text = f"{DROP}, waiver: {{reason: known, by: ann, until: 2027-01-31}}}}"
    (entry,) = load(folder, text).limits
    assert entry.waiver is not None and str(entry.waiver.until) == "2027-01-31"


MISTAKES = {
    "empty list": ("  []", "10:3: gate: found an empty list; allowed: at least 1 entry"),
    "no form at all": ("  5", "10:3: gate: found 5 (a whole number); allowed: a mapping"),
    "unknown key": (f"{DROP}, tsk: a}}", "10:42: gate[0]: unknown key 'tsk'; did you mean 'task'? (known: "),
    "unknown metric": ("- {metric: acuracy, at_most: 1}", "10:12: gate[0].metric: unknown metric 'acuracy'; did you"),
    "no metric": ("- {at_most: 1}", "10:3: gate[0].metric: missing; it is required: One of the metrics below"),
    "two bounds": (
        "- {metric: mean_kl, at_most: 1, at_least: 0}",
        "10:3: gate[0]: found at_most and at_least; give exactly one of max_drop_points, max_drop_relative, at_most",
    ),
    "no bound": ("- {metric: mean_kl}", "10:3: gate[0]: found no bound; give exactly one of"),
    "wrong side": (
        "- {metric: mean_kl, at_least: 0.05}",
        "10:21: gate[0].at_least: found at_least; lower is better, so give at_most",
    ),
    "wrong side of accuracy": (
        "- {metric: accuracy, vs: absolute, at_most: 0.9}",
        "10:36: gate[0].at_most: found at_most; higher is better, so give at_least",
    ),
    "absolute not said": (
        "- {metric: accuracy, at_least: 0.9}",
        "10:22: gate[0].at_least: found at_least without vs: absolute; add that, or give max_drop_points",
    ),
    "share where points are meant": (
        "- {metric: accuracy, max_drop_relative: 3}",
        "10:41: gate[0].max_drop_relative: found 3; allowed: 0 or more, less than 1; did you mean max_drop_points: 3?",
    ),
    "share of what has no zero": (
        "- {metric: mean_kl, max_drop_relative: 0.03}",
        "10:21: gate[0].max_drop_relative: mean_kl has no natural zero for that; give at_most, or the metric accuracy",
    ),
    "share of a ratio": (
        "- {metric: perplexity_ratio, max_drop_relative: 0.03}",
        "10:30: gate[0].max_drop_relative: perplexity_ratio is relative to the base model already; give at_most",
    ),
    "points of nats": ("- {metric: mean_kl, max_drop_points: 1}", "10:21: gate[0].max_drop_points: mean_kl is in nats"),
    "slice of what has none": (
        "- {metric: worst_domain_kl, at_most: 1, slice: {a: b}}",
        "10:41: gate[0].slice: worst_domain_kl is not measured by slice; remove it",
    ),
    "task of windows": (
        "- {metric: mean_kl, at_most: 1, task: a}",
        "10:33: gate[0].task: mean_kl is not measured on items of the suite; remove it",
    ),
    "slice in a name": (
        "- {metric: 'mean_kl[domain=law]', at_most: 1}",
        "10:12: gate[0].metric: found a slice in the name; give metric: mean_kl and slice: {domain: law}",
    ),
    "slice of what has none, in a mapping": (
        "  'worst_domain_kl[domain=law]': {max: 1}",
        "10:3: gate: unknown metric 'worst_domain_kl[domain=law]'",
    ),
    "lower bound without a stored baseline": (
        "- {metric: mean_kl_topk, at_most: 1, slice: {domain: law}}",
        "10:12: gate[0].metric: measured with evaluate.divergence.reference: stored; set that, or limit mean_kl",
    ),
    "absolute drop": (f"{DROP}, vs: absolute}}", "10:46: gate[0].vs: a drop is from something; remove it"),
    "previous of what is against the base": (
        "- {metric: mean_kl, at_most: 1, vs: previous-release}",
        "10:37: gate[0].vs: only drops of accuracy are measured against an earlier release",
    ),
    "no earlier release": (
        f"{DROP}, vs: previous-release}}",
        "10:46: gate[0].vs: there is no earlier release to compare with; add previous_release: <folder of its run>",
    ),
    "twice": (f"{DROP}}}\n{DROP}}}", "11:3: gate[1]: the same limit is given before; keep one"),
    "waiver without a day": (
        f"{DROP}, waiver: {{reason: a, by: b, until: soon}}}}",
        "10:76: gate[0].waiver.until: found 'soon'; allowed: a date such as 2027-01-31",
    ),
    "number as slice": (
        f"{DROP}, slice: {{year: 2024}}}}",
        "10:56: gate[0].slice.year: found 2024 (a whole number); allowed: text",
    ),
    "sliced accuracy in a mapping": (
        "  'accuracy[language=de]': {min: 0.9}",
        "10:3: gate: accuracy is limited in a list: - {metric: accuracy",
    ),
    "accuracy in a mapping": (
        "  accuracy: {min: 0.9}",
        "10:3: gate: accuracy is limited in a list: - {metric: accuracy",
    ),
}


@pytest.mark.parametrize(("gate", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_located_and_says_what_is_allowed(folder: Path, gate: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(folder, gate)
    line = str(caught.value).removeprefix(f"{folder}/r.yaml:")
    assert line.startswith(message), line
    assert "\n" not in line


def test_earlier_release_without_a_limit_and_correction_without_a_gate_are_refused(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"r\.yaml:11:1: previous_release: no limit is against it"):
        load(folder, f"{DROP}}}", "previous_release: old")
    with pytest.raises(RecipeError, match="found the output of this recipe, which a run overwrites"):
        load(folder, f"{DROP}, vs: previous-release}}", "previous_release: out")
    (folder / "r.yaml").write_text(RECIPE.replace("gate:\n", "correction: holm\n"))
    with pytest.raises(RecipeError, match=r"r\.yaml:9:1: correction: there is no gate whose checks"):
        load_recipe(folder / "r.yaml")


def test_the_example_of_the_documentation_is_legal(folder: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "gate.md").read_text(encoding="utf-8")
    example = text.split("```yaml\n", 1)[1].split("```", 1)[0]
    (folder / "r.yaml").write_text(RECIPE.removesuffix("gate:\n") + example)
    limits = load_recipe(folder / "r.yaml").limits
    assert [entry.vs for entry in limits] == ["baseline", "previous-release", "absolute", "baseline", "baseline"]
    assert limits[4].figure == "mean_kl[domain=chinese]"
    assert limits[1].waiver is not None and limits[1].min_items == 100
