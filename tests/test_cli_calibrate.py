"""``quantpipe calibrate`` from the command line: what it prints and writes, and one clear line for what is wrong."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from quantpipe import cli

SET = """
version: 1
name: docs
sources:
  - path: docs.jsonl
    fields: {text: text}
"""

EVALS = Path(__file__).parents[1] / "evals" / "quickstart"
RECIPE = """
version: 1
name: tiny
model: {model}
calibration:
  num_sequences: 3
  sequence_length: 40
  seed: 4
  set: {{sources: [{{path: docs/docs.jsonl, fields: {{text: text}}}}]}}
quantize: {{solver: gptq, scheme: {{name: w4a16, group_size: 64}}}}
bench: {{}}
gate: {{tpot_ratio_c8: {{max: 1.1}}}}
output: run
"""
SMALL = ("--num-sequences", "4", "--sequence-length", "32")


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "set.yaml").write_text(SET)
    parts = Path(str(textwrap.__file__)).read_text(encoding="utf-8").split("\n\n")
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": part}) + "\n" for part in parts if len(part) > 30))
    return folder


@pytest.fixture
def recipe(tmp_path: Path, tiny_llama: Path, docs: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(model=tiny_llama))
    return path


def run(*arguments: object) -> int:
    return cli.run(["calibrate", *map(str, arguments)])


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error of a command that printed nothing else."""
    out, err = capsys.readouterr()
    assert out == ""
    *stages, line = err.rstrip().splitlines()
    assert all(stage.startswith(" ") for stage in stages)
    return line


def test_build_prints_the_account_and_writes_only_where_it_is_told(
    docs: Path, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert run("build", docs, "--model", tiny_llama, *SMALL) == 0
    out = capsys.readouterr().out
    assert "docs: 4 x 32 = 128 tokens, digest " in out
    assert "nothing is written; --out FOLDER keeps the blocks" in out
    assert sorted(tmp_path.rglob("*")) == before
    assert run("build", docs / "set.yaml", "--model", tiny_llama, *SMALL, "--out", tmp_path / "built") == 0
    assert capsys.readouterr().out.splitlines()[:-1] == out.splitlines()[:-1]
    assert {path.name for path in (tmp_path / "built").iterdir()} == {
        "blocks.safetensors",
        "calibration.manifest.json",
    }
    assert run("inspect", tmp_path / "built", "--model", tiny_llama, "--quiet") == 0
    assert "docs: 4 x 32 = 128 tokens, digest " in capsys.readouterr().out


def test_a_recipe_gives_set_numbers_and_model_and_options_win(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("build", "--recipe", recipe, "--quiet") == 0
    first = capsys.readouterr().out
    assert "tiny: 3 x 40 = 120 tokens" in first
    assert run("build", "--recipe", recipe, "--num-sequences", 2, "--quiet") == 0
    assert "tiny: 2 x 40 = 80 tokens" in capsys.readouterr().out
    assert run("build", "--recipe", recipe, "--seed", 5, "--quiet") == 0
    assert capsys.readouterr().out != first


def test_inspect_without_a_model_counts_rows(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    num_rows = (docs / "docs.jsonl").read_text().count("\n")
    assert run("inspect", docs, "--show", 2) == 0
    out = capsys.readouterr().out
    assert f"docs.jsonl    {num_rows}" in out and out.count("\n--- ") == 2
    assert run("inspect", docs, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["sources"][0]["num_rows"] == num_rows
    assert "samples" not in record


def test_inspect_goes_as_far_as_the_set_does(docs: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", docs, "--model", tiny_llama, "--json", "--show", 1) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["sequence_length"] == 512 and 0 < record["num_sequences"] < 128
    assert record["account"][0]["num_tokens_used"] == 512 * record["num_sequences"]
    assert len(record["samples"]) == 1
    assert record["coverage"]["num_tokens"] == record["account"][0]["num_tokens_used"]
    assert record["coverage"]["held_out"] == []


def test_inspect_says_what_is_covered_of_the_rows_held_out(
    docs: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (docs / "set.yaml").write_text(SET.replace("sources:", "holdout: {frac: 0.5}\nsources:"))
    assert run("inspect", docs, "--model", tiny_llama, *SMALL) == 0
    out, err = capsys.readouterr()
    assert "vocabulary: " in out and "truncated: " in out
    assert ("held-out docs.jsonl: " in out) != ("held-out rows are not looked at: " in err)


def test_inspect_looks_at_the_windows_that_the_recipe_evaluates_on(
    docs: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in (docs / "docs.jsonl").read_text().splitlines()]
    parts = [row["text"][i : i + 200] for row in rows for i in range(0, len(row["text"]), 200)]
    topics = ["large" if i % 4 else f"small {i}" for i in range(len(parts))]
    lines = [json.dumps({"text": text, "topic": topic}) for text, topic in zip(parts, topics, strict=True)]
    (docs / "docs.jsonl").write_text("\n".join(lines))
    evaluate = f"evaluate: {{suite: {EVALS}, divergence: {{holdout: true, num_windows: 5, window_tokens: 24}}}}"
    asked = recipe.read_text().replace("{sources:", "{holdout: {frac: 0.5}, sources:").replace("bench: {}", evaluate)
    asked = asked.replace("fields: {text: text}", "fields: {text: text}, domain: {field: topic}")
    asked = asked.replace("seed: 4", "seed: 4\n  on_leakage: drop")
    recipe.write_text(asked.replace("{tpot_ratio_c8: {max: 1.1}}", "{mean_kl: {max: 1.0}}"))
    assert run("inspect", "--recipe", recipe, "--json") == 0
    out, err = capsys.readouterr()
    assert sum(each["num_tokens"] for each in json.loads(out)["coverage"]["held_out"]) == 5 * 24
    assert "held-out rows: 5 windows, " in err and "are not measured, such as small " in err


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["build"], 2, "calibrate: no set; give its folder or set.yaml, or --recipe with a calibration section"),
        (["build", "{docs}"], 2, "calibrate: whose tokens? give --model, or --recipe with its model"),
        (["build", "{docs}", "--model", "{tiny}", "--sed", "1"], 2, "calibrate build: No such option '--sed'"),
        (["build", "{docs}", "--model", "{tiny}", "--seed", "-1"], 2, "'--seed': -1 is not in the range x>=0"),
        (["build", "{docs}", "--model", "ftp://x/y"], 2, "--model: found 'ftp://x/y'; allowed: a hub id"),
        (["build", "{docs}/gone", "--model", "{tiny}"], 3, "holds no set.yaml; a calibration set is a folder with"),
        (["build", "{docs}", "--model", "{docs}/gone"], 3, "no such folder"),
        (["build", "{docs}", "--model", "{docs}"], 3, "holds no tokenizer that transformers can open"),
        (["build", "{docs}", "--model", "{tiny}"], 3, "asked for 128 x 512 = 65,536 tokens; the set has"),
        (["build", "{docs}", "--model", "{tiny}", *SMALL, "--out", "{docs}"], 3, "holds other files"),
        (["build", "--recipe", "{docs}/gone.yaml"], 2, "gone.yaml"),
        (["inspect", "{docs}", "--activations"], 2, "--activations: runs a model; give it with --model or --recipe"),
        (["inspect", "{docs}", "--show", "many"], 2, "'many' is not a valid integer"),
        (["compare", "{recipe}"], 2, "Missing option '--sets'"),
        (["compare", "{recipe}", "--sets", "{docs}"], 2, "--sets: found 1; name at least two"),
        (["compare", "{recipe}", "--sets", "{docs},{docs}"], 2, "--sets: two sets are called 'docs'"),
        (["compare", "{recipe}", "--sets", "{docs},b", "--seeds", "1"], 2, "'--seeds': 1 is not in the range x>=2"),
        (["compare", "{recipe}", "--sets", "{docs},b", "--on", "code"], 2, "found 'code'; write LABEL=PATH"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(
    docs: Path,
    recipe: Path,
    tiny_llama: Path,
    tmp_path: Path,
    arguments: list[str],
    code: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted(tmp_path.rglob("*"))
    places = {"docs": docs, "tiny": tiny_llama, "recipe": recipe}
    assert run(*(argument.format(**places) for argument in arguments)) == code
    assert line in only_line(capsys)
    assert sorted(tmp_path.rglob("*")) == before


def test_help_of_calibrate_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom quantpipe import cli\ncli.run(['calibrate', 'build', '--help'])\n"
        "assert not {'pydantic', 'yaml', 'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_inspect_tells_whether_held_out_activations_are_covered(
    docs: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (docs / "set.yaml").write_text(SET.replace("sources:", "holdout: {frac: 0.5}\nsources:"))
    assert run("inspect", docs, "--model", tiny_llama, *SMALL, "--activations", "--quiet") == 0
    out = capsys.readouterr().out
    assert "saturation: from 2 to 4 sequences the Hessian's diagonal changes by" in out
    assert run("inspect", docs, "--model", tiny_llama, *SMALL, "--activations", "--quiet", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["activations"]["inputs"]) == 4 * 6
