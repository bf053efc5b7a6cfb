"""set.yaml: what is legal, and that every problem is named with its place."""

import subprocess
import sys
from pathlib import Path

import pytest

from quantpipe.calibration.definition import JsonlSource, PythonStdlibSource, load_set
from quantpipe.errors import DataError, RecipeError

HEAD = "version: 1\nname: tiny\nsources:\n"


def problems_of(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "set.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_set(tmp_path)
    return [line.removeprefix(f"{tmp_path}/") for line in str(caught.value).splitlines()]


def test_sources_keep_their_order_kinds_and_labels(tmp_path: Path) -> None:
    (tmp_path / "set.yaml").write_text(
        HEAD
        + "  - {kind: python_stdlib, content: topics}\n"
        + "  - {kind: jsonl, path: a/b.jsonl, fields: {text: t}}\n"
        + "  - {kind: jsonl, name: talks, path: c.jsonl, fields: {messages: m}}\n"
    )
    definition = load_set(tmp_path)
    assert [type(source) for source in definition.sources] == [PythonStdlibSource, JsonlSource, JsonlSource]
    assert [source.label for source in definition.sources] == ["topics", "b.jsonl", "talks"]
    assert [source.uses_template for source in definition.sources] == [False, False, True]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (
            "{kind: jsonl, paht: a, path: a, fields: {text: t}}",
            "set.yaml:4:19: sources[0]: unknown key 'paht'; did you mean 'path'? "
            "(known: fields, kind, name, path, template)",
        ),
        (
            "{kind: jsonl, path: a, fields: {txt: t, text: t}}",
            "set.yaml:4:37: sources[0].fields: unknown key 'txt'; did you mean 'text'? "
            "(known: content, messages, prompt, response, role, text)",
        ),
        (
            "{kind: jsonll, path: a}",
            "set.yaml:4:12: sources[0].kind: unknown kind 'jsonll'; did you mean 'jsonl'? "
            "(known: jsonl, python_stdlib)",
        ),
        (
            "{kind: [a], path: a}",
            "set.yaml:4:12: sources[0].kind: unknown kind \"['a']\"; (known: jsonl, python_stdlib)",
        ),
        ("{path: a}", "set.yaml:4:5: sources[0]: missing key 'kind' (known: jsonl, python_stdlib)"),
        ("samples.jsonl", "set.yaml:4:5: sources[0]: found 'samples.jsonl' (text); allowed: a mapping with a kind"),
        (
            "{kind: jsonl, path: a, fields: {prompt: q}}",
            "set.yaml:4:36: sources[0].fields: found prompt; allowed: text, or messages, or prompt with response",
        ),
        (
            "{kind: jsonl, path: a, fields: {text: t, messages: m}}",
            "set.yaml:4:36: sources[0].fields: found text and messages; "
            "allowed: text, or messages, or prompt with response",
        ),
        (
            "{kind: jsonl, path: a, fields: {messages: m}, template: none}",
            "set.yaml:4:5: sources[0]: template none cannot render messages; use template: tokenizer",
        ),
        (
            "{kind: python_stdlib, content: topics, chunk_chars: 5}",
            "set.yaml:4:57: sources[0].chunk_chars: found 5; allowed: 100 or more",
        ),
    ],
)
def test_wrong_source_is_named_with_line_and_column(tmp_path: Path, source: str, problem: str) -> None:
    assert problems_of(tmp_path, f"{HEAD}  - {source}\n") == [problem]


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    lines = problems_of(tmp_path, "version: 2\nnmae: x\nname: x\nsources:\n  - {kind: x}\n  - {kind: jsonl, path: a}\n")
    assert [line.split(": ")[0] for line in lines] == ["set.yaml:1:10", "set.yaml:2:1", "set.yaml:5:12", "set.yaml:6:5"]


def test_two_sources_may_not_share_a_name(tmp_path: Path) -> None:
    source = "  - {kind: jsonl, path: x/a.jsonl, fields: {text: t}}\n"
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


def test_example_in_the_docs_is_legal(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "calibration.md").read_text(encoding="utf-8")
    [example] = [block for block in page.split("```yaml\n")[1:] if block.startswith("version:")]
    (tmp_path / "set.yaml").write_text(example.partition("```")[0], encoding="utf-8")
    assert [source.label for source in load_set(tmp_path).sources] == ["tickets.jsonl"]


def test_checking_a_set_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, quantpipe.calibration; print({'torch', 'transformers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"
