"""Every way a command can end: one line on standard error, the right exit code, and nothing heavy imported for it."""

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from quantpipe import cli
from quantpipe.errors import ArtifactError, DataError, QuantpipeError, RecipeError

RECIPE = """\
version: 1
name: legal
model: owner/name
quantize: {solver: rtn, scheme: w8a8, kv_cache: int8_per_token_head}
bench: {}
gate: {tpot_ratio_c8: {max: 1.1}}
output: out
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    return path


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_a_legal_recipe_is_summed_up_on_standard_output(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check", str(recipe)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("legal: legal\n")
    assert "rtn to w8a8, kv_cache int8_per_token_head" in out
    assert "tpot_ratio_c8 <= 1.1" in out
    assert err == ""


def test_a_misspelt_key_exits_2_and_names_the_right_one(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.write_text(RECIPE.replace("scheme: w8a8", "scheme: {name: w4a16, group_sise: 64}"))
    assert cli.run(["check", str(recipe)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{recipe}:4:47: quantize.scheme: unknown key 'group_sise'; did you mean 'group_size'?")


def test_set_options_are_applied_and_checked(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check", str(recipe), "--set", "name=other", "--set", "bench.concurrency=[8]"]) == 0
    assert capsys.readouterr().out.startswith("other: legal\n")
    assert cli.run(["check", str(recipe), "--set", "bench.repeat=2"]) == 2
    assert capsys.readouterr().err.startswith("--set bench.repeat: unknown key 'repeat'; did you mean 'repeats'?")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "Missing command"),
        (["chek"], "check"),
        (["check"], "RECIPE"),
        (["check", "gone.yaml"], "gone.yaml"),
        (["check", "--sett", "a=1", "gone.yaml"], "--set"),
        (["--debugg"], "--debug"),
    ],
)
def test_usage_errors_exit_2_with_one_line(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert named in err
    assert err.count("\n") == 1


def test_the_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["schema"]) == 0
    assert "output" in json.loads(capsys.readouterr().out)["required"]
    assert cli.run(["schema", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("# Recipes")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RecipeError("a"), 2, "a"),
        (DataError("a"), 3, "a"),
        (ArtifactError("a"), 3, "a"),
        (QuantpipeError("a"), 1, "a"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/y"),
            3,
            "/x/y: no space left on the disk; free space and",
        ),
        (OSError(errno.EFBIG, "File too large"), 3, "disk: the file may not grow larger here; raise the limit"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), 3, "/x/y: may not be read or written"),
        (click.UsageError("Bad thing."), 2, "quantpipe: Bad thing; see quantpipe --help"),
        (ZeroDivisionError("division\nby zero"), 1, "internal error: ZeroDivisionError: division by zero; run"),
    ],
)
def test_every_failure_has_its_exit_code_and_one_line(error: Exception, code: int, text: str) -> None:
    message, found = cli.failure(error)
    assert found == code
    assert message.startswith(text)
    assert "\n" not in message


def ending(recipe: Path, raised: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``quantpipe check`` in a process of its own where loading the recipe raises."""
    return run_python(
        "import sys, quantpipe.recipe.schema as r\nfrom quantpipe import cli\n"
        f"def load(*_):\n    raise {raised}\n"
        f"r.load_recipe = load\nsys.argv[1:] = {[*options, 'check', str(recipe)]!r}\ncli.main()"
    )


def test_an_interrupt_ends_with_130_and_one_line(recipe: Path) -> None:
    done = ending(recipe, "KeyboardInterrupt")
    assert done.returncode == 130
    assert done.stderr.strip().count("\n") == 0
    assert "interrupted" in done.stderr


def test_an_unexpected_error_is_one_line_and_its_traceback_is_kept_for_debug(recipe: Path) -> None:
    done = ending(recipe, "ZeroDivisionError('why')")
    assert done.returncode == 1
    assert done.stderr.startswith("internal error: ZeroDivisionError: why; run the command again as 'quantpipe --debug")
    assert done.stderr.count("\n") == 1
    shown = ending(recipe, "ZeroDivisionError('why')", "--debug").stderr
    assert "Traceback" in shown
    assert shown.count("ZeroDivisionError: why") == 1
    assert "run the command again" not in shown


def test_a_closed_pipe_is_quiet() -> None:
    command = [sys.executable, "-c", "from quantpipe.cli import main; main()", "schema"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == cli.EXIT_BROKEN_PIPE


@pytest.mark.parametrize(
    ("command", "module", "loader", "line"),
    [
        ("run", "quantpipe.recipe.schema", "load_recipe", "no verdict was written; run it again to go on from there"),
        ("serve", "quantpipe.serve.server", "run_server", "nothing is served any more"),
    ],
)
def test_a_termination_ends_with_143_and_one_line(
    recipe: Path, command: str, module: str, loader: str, line: str
) -> None:
    code = (
        f"import os, signal, sys\nfrom quantpipe import cli\nimport {module} as module\n"
        "def load(*_): os.kill(os.getpid(), signal.SIGTERM)\n"
        f"module.{loader} = load\nsys.argv = ['quantpipe', {command!r}, {str(recipe)!r}]\ncli.main()"
    )
    done = run_python(code)
    assert done.returncode == cli.EXIT_TERMINATED
    assert done.stderr == f"quantpipe: terminated; {line}\n"


@pytest.mark.parametrize(("number", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
@pytest.mark.parametrize(
    "raised", ["ValueError('no shape')", "RuntimeError('why')", "DataError('a')", "BrokenPipeError()", "SystemExit(1)"]
)
def test_a_signal_whose_exception_a_library_replaces_ends_as_the_signal_does(
    recipe: Path, number: str, code: int, word: str, raised: str
) -> None:
    code_text = (
        "import os, signal, sys\nfrom quantpipe import cli\nfrom quantpipe.errors import DataError\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which a shell may have switched off for us
        "import quantpipe.recipe.schema as schema\n"
        "def load(*_):\n"
        f"    try:\n        os.kill(os.getpid(), signal.{number})\n"
        f"    except BaseException:\n        raise {raised} from None\n"
        f"schema.load_recipe = load\nsys.argv = ['quantpipe', 'quantize', {str(recipe)!r}]\ncli.main()"
    )
    done = run_python(code_text)
    assert done.returncode == code
    assert done.stderr == f"quantpipe: {word}; no artifact was written; run it again to go on from there\n"


def test_an_interrupt_that_the_shell_has_switched_off_stays_so(recipe: Path) -> None:
    code = (
        "import os, signal, sys\nfrom quantpipe import cli\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\nimport quantpipe.recipe.schema as schema\n"
        "read = schema.load_recipe\n"
        "def load(*given):\n    os.kill(os.getpid(), signal.SIGINT)\n    return read(*given)\n"
        f"schema.load_recipe = load\nsys.argv = ['quantpipe', 'check', {str(recipe)!r}]\ncli.main()"
    )
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_and_check_import_nothing_heavy(recipe: Path) -> None:
    heavy = ["torch", "transformers", "numpy", "datasets", "huggingface_hub", "fastapi"]
    code = (
        "import sys\nfrom quantpipe import cli\n"
        "cli.run(['--help'])\nassert not {'pydantic', 'yaml'} & set(sys.modules), 'help'\n"
        f"assert cli.run(['check', {str(recipe)!r}]) == 0\nassert not set({heavy}) & set(sys.modules), 'check'"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_a_recipes_set_is_checked_with_it_down_to_missing_files(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = RECIPE.replace("rtn, scheme: w8a8", "gptq, scheme: w4a16")
    recipe.write_text(text + "calibration:\n  set:\n    sources: [{path: gone.csv}]\n")
    assert cli.run(["check", str(recipe)]) == 3
    line = 1 + text.count("\n") + 2
    gone = f"{recipe}:{line}:22: {recipe.parent}/gone.csv: no such file; correct the path of source 'gone.csv'"
    assert capsys.readouterr().err.strip() == gone
    (recipe.parent / "gone.csv").write_text("text\n")
    assert cli.run(["check", str(recipe)]) == 0
    assert "128 x 512 tokens of the recipe's own set" in capsys.readouterr().out
    assert cli.run(["check", str(recipe), "--set", "calibration.set.bad_rows=keep"]) == 2
    assert "unknown bad_rows 'keep'" in capsys.readouterr().err


@pytest.fixture
def served_settings(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings that ``serve`` hands on, of each call."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("quantpipe.serve.server.run_server", lambda _folders, settings, *_: seen.append(settings))
    return seen


def test_settings_of_the_engine_reach_it_by_name(served_settings: list[dict[str, Any]]) -> None:
    from quantpipe.engine.config import EngineConfig

    settings = ["max_prefill_chunk=128", "target_step_s=1", "batching=static", "num_kv_blocks=null"]
    options = [part for setting in settings for part in ("--engine", setting)]
    assert cli.run(["serve", "nowhere", "--skip-verify", "--max-num-seqs", "4", *options]) == 0
    (handed,) = served_settings
    config = EngineConfig(max_num_seqs=4, max_prefill_chunk=128, target_step_s=1, batching="static")
    assert EngineConfig.of(handed) == config


def test_serve_offers_every_policy_and_drafter_of_the_engine() -> None:
    from quantpipe.engine.policies import POLICIES
    from quantpipe.engine.speculative.drafter import DRAFTERS, NO_DRAFTER

    for name, known in (("policy", [*POLICIES]), ("speculative", [NO_DRAFTER, *DRAFTERS])):
        [parameter] = [parameter for parameter in cli.serve.params if parameter.name == name]
        assert isinstance(parameter.type, click.Choice) and list(parameter.type.choices) == known


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-cache-memory", "1000", "--memory-utilization", "0.5"], "engine.memory_utilization: the pool of KV"),
        (["--sink-tokens", "4"], "engine.sink_tokens: 4 sinks stand before a window; give engine.window_tokens too"),
        (
            ["--engine", "max_prefil_chunk=3"],
            "engine.max_prefil_chunk: unknown setting; did you mean 'max_prefill_chunk'?",
        ),
        (["--engine", "max_prefill_chunk=many"], "engine.max_prefill_chunk: 'many' is no whole number or null"),
        (["--engine", "max_prefill_chunk=true"], "engine.max_prefill_chunk: True is no whole number or null"),
        (["--engine", "max_prefill_chunk=0"], "engine.max_prefill_chunk: 0 is below 1"),
        (["--engine", "batching=[static]"], "engine.batching: ['static'] is no text"),
        (["--engine", "batching=sttic"], "engine.batching: unknown 'sttic'; did you mean 'static'?"),
    ],
)
def test_settings_that_no_engine_can_have_are_handed_on_as_given_and_refused_there(
    options: list[str], message: str, served_settings: list[dict[str, Any]]
) -> None:
    from quantpipe.engine.config import EngineConfig
    from quantpipe.errors import RecipeError

    assert cli.run(["serve", "nowhere", *options]) == 0
    with pytest.raises(RecipeError) as caught:
        EngineConfig.of(served_settings[0])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory-utilization", "0"], "quantpipe serve: Invalid value for '--memory-utilization'"),
        (["--kv-cache-memory", "0"], "quantpipe serve: Invalid value for '--kv-cache-memory'"),
        (["--drain-s", "-1"], "quantpipe serve: Invalid value for '--drain-s'"),
        (["--hung-s", "0"], "quantpipe serve: Invalid value for '--hung-s'"),
        (["--engine", "target_step_s={"], "--engine: the value of target_step_s, '{', cannot be read"),
        (["--engine", "block_size"], "--engine: 'block_size' is not KEY=VALUE"),
        (["--engine", "max_num_seqs=4"], "--engine: max_num_seqs has an option of its own, --max-num-seqs"),
        (["--engine", "block_size=4", "--engine", "block_size=8"], "--engine: block_size is given twice"),
        # By the engine's process: the same line, and the same exit code.
        (["--engine", "max_prefil_chunk=3"], "--engine max_prefil_chunk: unknown setting; did you mean"),
        (["--engine", "kv_cache=int8_static"], "--engine kv_cache: unknown setting; did you mean 'kv_dtype'?"),
        (["--sink-tokens", "4"], "--sink-tokens: 4 sinks stand before a window; give --window-tokens too"),
        (["--engine", "=4"], "--engine: '=4' is not KEY=VALUE"),
    ],
)
def test_settings_that_serve_cannot_have_are_refused_in_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["serve", "nowhere", *options]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(message) and shown.count("\n") == 1
