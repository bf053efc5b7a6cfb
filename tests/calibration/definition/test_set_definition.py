"""set.yaml: what is legal, and that every problem is named with its place."""

import subprocess
import sys
from pathlib import Path

import pytest

from quantpipe.calibration.definition.set_definition import load_set, set_of_recipe
from quantpipe.calibration.definition.sources import DatasetSource, FileSource, PythonStdlibSource, SelfSource
from quantpipe.errors import DataError, RecipeError
from quantpipe.recipe.schema import Recipe, load_recipe

HEAD = "version: 1\nname: tiny\nsources:\n"
TELLING = "(known: dataset, kind, path)"
KINDS = "(known: dataset, file, python_stdlib, self)"
RECIPE = """\
version: 1
name: legal
model: owner/name
quantize: {solver: gptq, scheme: w4a16}
bench: {}
gate: {tpot_ratio_c1: {max: 1}}
output: out
calibration:
"""


def definition_of(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "set.yaml").write_text(text, encoding="utf-8")
    return [source.label for source in load_set(tmp_path).sources]


def problems_of(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "set.yaml").write_text(text, encoding="utf-8")
    with pytest.raises((RecipeError, DataError)) as caught:
        load_set(tmp_path)
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


def recipe_of(tmp_path: Path, text: str, *overrides: str) -> Recipe:
    (tmp_path / "r.yaml").write_text(RECIPE + text, encoding="utf-8")
    return load_recipe(tmp_path / "r.yaml", overrides)


def test_sources_keep_their_order_kinds_and_labels(tmp_path: Path) -> None:
    (tmp_path / "set.yaml").write_text(
        HEAD
        + "  - {kind: python_stdlib, content: topics}\n"
        + "  - {path: a/b.csv.gz}\n"
        + "  - {kind: jsonl, name: talks, path: c, fields: {messages: m}}\n"
        + "  - {dataset: org/name, split: test}\n"
        + "  - {kind: self}\n"
    )
    sources = load_set(tmp_path).sources
    assert [type(source) for source in sources] == [
        PythonStdlibSource,
        FileSource,
        FileSource,
        DatasetSource,
        SelfSource,
    ]
    assert [source.label for source in sources] == ["topics", "b.csv.gz", "talks", "org/name", "self"]
    talks = sources[2]
    assert isinstance(talks, FileSource)
    assert talks.format_of("c") == "jsonl"


def test_a_set_of_one_line_has_safe_defaults(tmp_path: Path) -> None:
    (tmp_path / "set.yaml").write_text(HEAD + "  - path: rows.csv\n")
    header = load_set(tmp_path).header
    assert header.near_duplicates == 0.8
    assert header.bad_rows == "refuse"
    assert header.packing == "concatenate"
    assert not header.redact.is_off
    assert header.holdout is None


def test_the_file_itself_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text(HEAD + "  - path: rows.csv\n")
    definition = load_set(tmp_path / "other.yaml")
    assert (definition.folder, definition.file, definition.name) == (tmp_path, tmp_path / "other.yaml", "tiny")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (
            "{kind: dataset, datset: a, dataset: a}",
            "set.yaml:4:21: sources[0]: unknown key 'datset'; did you mean 'dataset'? (known: config, dataset, domain, "
            "drop_columns, fields, filter, group, kind, language, limit, max_group_frac, name, revision, split, "
            "template, weight)",
        ),
        (
            "{path: a.csv, fields: {txt: t, text: t}}",
            "set.yaml:4:28: sources[0].fields: unknown key 'txt'; did you mean 'text'? "
            "(known: content, messages, prompt, response, role, roles, system, text)",
        ),
        ("{kind: flie}", f"set.yaml:4:12: sources[0].kind: unknown kind 'flie'; did you mean 'file'? {KINDS}"),
        ("{kind: [a], path: a}", f"set.yaml:4:12: sources[0].kind: unknown kind \"['a']\" {KINDS}"),
        (
            "{pth: a.csv}",
            "set.yaml:4:6: sources[0]: unknown key 'pth'; did you mean 'path'? (known: dataset, kind, path)",
        ),
        (
            "{datset: a/b}",
            "set.yaml:4:6: sources[0]: unknown key 'datset'; did you mean 'dataset'? (known: dataset, kind, path)",
        ),
        (
            "{kin: self}",
            "set.yaml:4:6: sources[0]: unknown key 'kin'; did you mean 'kind'? (known: dataset, kind, path)",
        ),
        ("{name: a}", f"set.yaml:4:5: sources[0]: missing: a path, a dataset, or a kind {KINDS}"),
        (
            "samples.jsonl",
            "set.yaml:4:5: sources[0]: found 'samples.jsonl' (text); allowed: a mapping with a path, dataset or kind",
        ),
        (
            "{kind: python_stdlib, content: topics, chunk_chars: 5}",
            "set.yaml:4:57: sources[0].chunk_chars: found 5; allowed: 100 or more",
        ),
        ("{path: a.csv, weight: -1}", "set.yaml:4:27: sources[0].weight: found -1; allowed: 0 or more"),
        ("{path: a.csv, weight: 0}", "set.yaml:4:27: sources[0].weight: all weights are 0; make one more than 0"),
        (
            "{path: a.csv, weight: .nan}",
            "set.yaml:4:27: sources[0].weight: found nan (a number); allowed: a finite number",
        ),
        (
            "{path: a.csv, language: auto}",
            "set.yaml:4:29: sources[0].language: auto chooses among the set's languages; list two or more there, or "
            "name the language here",
        ),
        (
            "{path: a.csv, template: tokenzier}",
            "set.yaml:4:29: sources[0].template: no file tokenzier; did you mean 'tokenizer'? (known: none, "
            "tokenizer), or the path of a Jinja file",
        ),
        (
            "{path: folder}",
            "set.yaml:4:12: sources[0].path: folder is a folder; give a file, or a pattern such as folder/*",
        ),
        (
            "{path: folder, format: csv}",
            "set.yaml:4:12: sources[0].path: folder is a folder; give a file, or a pattern such as folder/*",
        ),
    ],
)
def test_wrong_source_is_named_with_line_and_column(tmp_path: Path, source: str, problem: str) -> None:
    (tmp_path / "folder").mkdir()
    assert problems_of(tmp_path, f"{HEAD}  - {source}\n") == [problem]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("near_duplicates: 80", "found 80 (a whole number); allowed: a number above 0, at most 1, or off"),
        ("near_duplicates: 'no'", "found 'no' (text); allowed: a number above 0, at most 1, or off"),
        ("redact:", "found nothing (null); allowed: off, or a mapping"),
        ("redact: 'no'", "found 'no' (text); allowed: off, or a mapping"),
        ("bad_rows: skip", "unknown bad_rows 'skip' (known: drop, refuse)"),
        (
            "packing: seperate",
            "unknown packing 'seperate'; did you mean 'separate'? (known: concatenate, separate, truncate)",
        ),
        ("stratify: [length, length]", "found one more than once; list each once"),
        ("holdout: {frac: 1.0}", "found 1; allowed: less than 1"),
    ],
)
def test_wrong_header_says_what_is_allowed(tmp_path: Path, line: str, problem: str) -> None:
    [found] = problems_of(tmp_path, f"{line}\n{HEAD}  - path: a.csv\n")
    assert found.startswith("set.yaml:1:")
    assert found.endswith(problem)


def test_one_weight_asks_for_all(tmp_path: Path) -> None:
    sources = "  - {path: a.csv, weight: 2.0}\n  - {path: b.csv}\n"
    assert problems_of(tmp_path, HEAD + sources) == [
        "set.yaml:5:5: sources[1]: missing: weight; other sources have one, so give it to all or to none"
    ]
    assert definition_of(tmp_path, HEAD + sources.replace("b.csv", "b.csv, weight: 0")) == ["a.csv", "b.csv"]


def test_off_and_numbers_set_near_duplicates(tmp_path: Path) -> None:
    for written, meant in (("off", None), ("1", 1.0), ("0.5", 0.5)):
        (tmp_path / "set.yaml").write_text(f"near_duplicates: {written}\n{HEAD}  - path: a.csv\n")
        assert load_set(tmp_path).header.near_duplicates == meant


def test_a_template_that_is_none_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("one\n{% for x in messages %}\n")
    [problem] = problems_of(tmp_path, HEAD + "  - {path: a.csv, template: chat.jinja}\n")
    assert problem.startswith("set.yaml:4:29: sources[0].template: chat.jinja:2: not a Jinja template: ")


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    lines = problems_of(tmp_path, "version: 2\nnmae: x\nname: x\nsources:\n  - {kind: x}\n  - {path: a}\n")
    assert [line.split(": ")[0] for line in lines] == ["set.yaml:1:10", "set.yaml:2:1", "set.yaml:5:12", "set.yaml:6:5"]


def test_two_sources_may_not_share_a_name(tmp_path: Path) -> None:
    source = "  - {path: x/a.jsonl}\n"
    assert problems_of(tmp_path, HEAD + source + source.replace("x/", "y/")) == [
        "set.yaml:4:3: sources: two sources are called 'a.jsonl'; give one another name"
    ]


def test_no_sources_are_refused(tmp_path: Path) -> None:
    assert problems_of(tmp_path, HEAD.replace("sources:", "sources: []")) == [
        "set.yaml:3:10: sources: found an empty list; allowed: at least 1 entry"
    ]


def test_folder_without_a_definition_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no set.yaml; a calibration set is a folder with a set.yaml"):
        load_set(tmp_path)


def test_a_set_inside_a_recipe_is_relative_to_it_and_may_lack_version_and_name(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "  set:\n    sources:\n      - path: rows.csv\n")
    definition = set_of_recipe(recipe)
    assert not isinstance(definition, Path)
    assert (definition.name, definition.folder, definition.file) == ("legal", tmp_path, tmp_path / "r.yaml")


def test_a_mistake_in_a_recipes_set_has_the_recipes_line(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "  set:\n    sources:\n      - {path: rows.csv, wieght: 1}\n")
    with pytest.raises(RecipeError) as caught:
        set_of_recipe(recipe)
    assert str(caught.value).startswith(
        f"{tmp_path}/r.yaml:11:26: calibration.set.sources[0]: unknown key 'wieght'; did you mean 'weight'?"
    )
    overridden = recipe_of(tmp_path, "  set: {sources: [{path: rows.csv}]}\n", "calibration.set.bad_rows=keep")
    with pytest.raises(RecipeError) as caught:
        set_of_recipe(overridden)
    assert str(caught.value) == "--set calibration.set.bad_rows: unknown bad_rows 'keep' (known: drop, refuse)"


def test_a_recipe_may_name_a_built_set(tmp_path: Path) -> None:
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / "calibration.manifest.json").touch()
    assert set_of_recipe(recipe_of(tmp_path, "  set: built\n")) == tmp_path / "built"


def test_examples_in_the_docs_are_legal(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "calibration.md").read_text(encoding="utf-8")
    examples = [block.partition("```")[0] for block in page.split("```yaml\n")[1:] if block.startswith("version:")]
    assert examples
    for example in examples:
        assert definition_of(tmp_path, example)
    [inline] = [block.partition("```")[0] for block in page.split("```yaml\ncalibration:\n")[1:] if "sources:" in block]
    definition = set_of_recipe(recipe_of(tmp_path, inline))
    assert not isinstance(definition, Path)
    assert len(definition.sources) == 2


def test_checking_a_set_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, quantpipe.calibration\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'jinja2', 'phonenumbers', 'datasketch'}\n"
        "print(heavy & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"
