"""The scripts in ``bench/`` run unattended to their tables; the rows of those that quantize are legal recipes."""

import importlib
import json
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import pytest

from quantpipe.formats.kv_mode import KV_MODES
from quantpipe.recipe.quantize_section import QuantizeSection

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "bench" / "quantize_table.py"


@pytest.fixture
def bench_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))


@pytest.mark.usefixtures("bench_modules")
def test_every_row_of_ours_is_a_quantize_section() -> None:
    from quantize.rows import OURS, ROWS  # type: ignore[import-not-found]

    sections = [row.section for row in ROWS.values() if row.tool == OURS and row.section is not None]
    assert sections and all(QuantizeSection.model_validate(section) for section in sections)


@pytest.mark.usefixtures("bench_modules")
def test_rows_are_found_by_name_kind_and_tool() -> None:
    from quantize.rows import PAIRS, ROWS, named

    assert [row.name for row in named(["gptq", "rtn-absmax", "gptq"])] == ["gptq", "rtn-absmax"]
    assert {row.kind for row in named(["w8a8"])} == {"w8a8"} and len(named(["all"])) == len(ROWS)
    assert all(name in ROWS for pair in PAIRS.values() for name in pair)
    with pytest.raises(SystemExit, match="no row, kind or tool named 'gtpq'"):
        named(["gtpq"])


@pytest.mark.usefixtures("bench_modules")
def test_a_table_shows_the_last_run_of_a_row_with_the_median_of_its_rounds() -> None:
    from quantize.table import latest, markdown_row

    def record(number: int, wall_s: float, **figures: float) -> dict[str, object]:
        cost = {"wall_s": wall_s, "cpu_s": 2 * wall_s, "peak_gb": 1.5}
        row = {"model": "m", "row": "gptq", "tool": "quantpipe", "round": number, "weights_mb": 113.2, "cost": cost}
        return row | figures

    figures = {"mean_kl": 0.1534, "p99_kl": 1.25, "top1_agreement": 0.79, "perplexity_ratio": 1.139}
    records = [record(0, 900.0), record(0, 50.0, **figures), record(1, 60.0), record(2, 70.0)]
    (last,) = latest(records)
    assert markdown_row(last) == ("| m | gptq | quantpipe | 0.153 | 1.25 | 0.790 | 1.139 | 113 | 60 | 120 | 1.50 |")


@pytest.mark.slow
def test_driver_judges_a_row_and_goes_on_after_one_that_fails(tiny_llama: Path, tmp_path: Path) -> None:
    text = ROOT / "README.md"
    options = ["--model", tiny_llama, "--calibration-text", text, "--test-text", text, "--out", tmp_path]
    options += ["--num-windows", 2, "--window-tokens", 32, "--num-test-windows", 2, "--threads", 1]
    command = [sys.executable, SCRIPT, "--rows", "llmc-rtn", "rtn-absmax", *options]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    failed, judged = map(json.loads, (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines())
    assert "--peer-python" in failed["error"]
    assert 0 < judged["mean_kl"] < 0.1 and judged["num_positions"] == 62
    assert judged["cost"]["cpu_s"] > 0 and 0.05 < judged["cost"]["peak_gb"] < 8
    assert judged["phases"]["bits_per_weight"] == pytest.approx(4.25, rel=0.01)  # each linear stores its shape too
    assert "| tiny_llama | rtn-absmax | quantpipe |" in done.stdout


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [f"2023-11-16 18:15:{46 + i % 9}.{i:07},{30 + 37 * i % 200},{4 + 13 * i % 40}" for i in range(9)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n", encoding="utf-8")
    return path


def table_of(
    script: str, options: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, list[str]]:
    """What ``main`` of a script prints, by the first cell of each row."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, options)])
    importlib.import_module(script).main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    return {name: cells for name, *cells in rows[1:]}


@pytest.mark.usefixtures("bench_modules")
@pytest.mark.parametrize("is_measured", [False, True])
def test_batching_modes_serves_a_trace_on_either_clock(
    is_measured: bool,
    trace: Path,
    random_llama: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options: list[object] = [trace, "--num-requests", 9, "--scale", 0.2, "--max-model-len", 64, "--max-num-seqs", 3]
    options += ["--static-wait-s", 0.01, *(["--model", random_llama(), "--threads", 1] if is_measured else [])]
    table = table_of("batching_modes", options, monkeypatch, capsys)
    assert list(table) == ["continuous", "dynamic", "static"]
    assert all(float(tok_s) > 0 and 0 < int(efficiency[:-1]) <= 100 for tok_s, *_, efficiency in table.values())


@pytest.mark.usefixtures("bench_modules")
def test_reserving_the_longest_length_holds_the_least(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [trace, "--num-requests", 9, "--load", 4, "--max-model-len", 512, "--scale", 1, "--pool-tokens", 1024]
    table = table_of("kv_utilization", list(options), monkeypatch, capsys)
    held = [int(of_pool[:-1]) for of_pool, *_ in table.values()]
    assert len(held) == 4 and held[0] == min(held) < max(held)


@pytest.mark.usefixtures("bench_modules")
def test_a_trace_that_does_not_fit_is_refused(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from request_trace import read_trace  # type: ignore[import-not-found]

    with pytest.raises(SystemExit, match="9 requests, 10 wanted"):
        read_trace(trace, 10, 1.0, 4096)
    with pytest.raises(SystemExit, match="lower --scale"):
        read_trace(trace, 9, 1.0, 100)


@pytest.mark.usefixtures("bench_modules")
def test_what_is_known_of_a_prompt_and_what_modes_cost_is_measured_on_a_model(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", tiny_llama, "--system-tokens", 40, "--question-tokens", 8, "--repeats", 2]
    times = table_of("prefix_cache", list(options), monkeypatch, capsys)
    assert list(times) == ["off", "cold", "warm"]
    options = ["--model", tiny_llama, "--text", ROOT / "README.md", "--num-windows", 2, "--window-tokens", 32]
    modes = table_of("kv_dtypes", [*options, "--context-tokens", 64, "--chunk", 8], monkeypatch, capsys)
    assert list(modes) == list(KV_MODES)
    assert int(modes["int8_per_token_head"][1]) > 1.5 * int(modes["auto"][1])
    assert float(modes["auto"][2]) == 0 < float(modes["int8_per_token_head"][2]) < 0.1


@pytest.mark.usefixtures("bench_modules")
def test_a_stored_baseline_gives_a_lower_bound_at_some_bytes_per_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quantpipe.controls.tiny_model import KINDS, write_base, write_kind

    base = write_base(tmp_path / "base")
    options = ["--base", base, "--model", write_kind(KINDS["w4a16 g32"], base, tmp_path / "w4")]
    options += ["--text", ROOT / "README.md", "--num-windows", 2, "--window-tokens", 32, "--top-k", 8, 512]
    table = table_of("fidelity", options, monkeypatch, capsys)
    assert list(table) == ["run", "store 8", "stored 8", "store 512", "stored 512"]
    assert [table[f"store {k}"][2] for k in (8, 512)] == ["68", "3092"]
    assert 0 < float(table["stored 8"][5]) < 1.0 == float(table["stored 512"][5]) == float(table["run"][5])


@pytest.mark.slow
@pytest.mark.usefixtures("bench_modules")
def test_two_servers_take_turns_and_are_ended(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve = f"{sys.executable} -c 'from quantpipe.cli import main; main()' serve {tiny_llama} --port {{port}}"
    options = ["--server", f"plain={serve} --backend reference", "--server", f"torch={serve} --backend torch"]
    options += ["--tokenizer", tiny_llama, "--text", ROOT / "README.md", "--out", tmp_path / "out.md"]
    options += ["--concurrency", 1, 3, "--prompt-tokens", 12, "--new-tokens", 4, "--repeats", 2, "--logs", tmp_path]
    monkeypatch.setattr(sys, "argv", ["vs_cpu_servers", *map(str, options)])
    importlib.import_module("vs_cpu_servers").main()
    printed = capsys.readouterr().out
    assert (tmp_path / "out.md").read_text(encoding="utf-8").strip() == printed.strip()
    figures, ratios, facts = (part.splitlines()[2:] for part in printed.strip().split("\n\n")[2:])
    assert [line.strip("| ").split(" | ")[:2] for line in figures] == [
        ["1", "plain"], ["1", "torch"], ["3", "plain"], ["3", "torch"]
    ]  # fmt: skip
    assert all(float(cell) > 0 for line in figures for cell in line.strip("| ").split(" | ")[2:])
    assert len(ratios) == 2
    assert all(float(cell) > 0 for line in facts for cell in line.strip("| ").split(" | ")[1:])


@pytest.mark.usefixtures("bench_modules")
def test_servers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    from servers.process import Server  # type: ignore[import-not-found]
    from vs_cpu_servers import parse_server  # type: ignore[import-not-found]

    for option, problem in (("name", "is not NAME=COMMAND"), ("name=command", "where {port} goes")):
        with pytest.raises(ArgumentTypeError, match=problem):
            parse_server(option)
    with pytest.raises(SystemExit, match="a: ended with 3"):
        Server("a", f"{sys.executable} -c 'raise SystemExit(3)' {{port}}").start(tmp_path / "log")


@pytest.mark.slow
@pytest.mark.usefixtures("bench_modules")
def test_cost_of_serving_is_measured_with_a_model_and_without(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [tiny_llama, "--text", ROOT / "README.md", "--concurrency", 1, 3, "--repeats", 2, "--null-tokens", 20]
    options += ["--prompt-tokens", 12, "--new-tokens", 4, "--max-model-len", 64]
    monkeypatch.setattr(sys, "argv", ["server_front", *map(str, options)])
    module = importlib.import_module("server_front")
    monkeypatch.setattr(module, "NUM_SHORT", 12)
    module.main()
    compared, costs = (part.splitlines()[2:] for part in capsys.readouterr().out.strip().split("\n\n")[1:])
    rows = [line.strip("| ").split(" | ") for line in compared]
    assert [row[:2] for row in rows] == [["1", "in process"], ["1", "HTTP"], ["3", "in process"], ["3", "HTTP"]]
    assert all(float(cell) > 0 for row in rows for cell in row[2:5])
    rows = [line.strip("| ").split(" | ") for line in costs]
    assert [row[:2] for row in rows] == [[level, load] for level in ("1", "3") for load in ("streams", "one token")]
    assert all(float(row[3]) > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("bench_modules")
def test_soak_finds_a_sound_server_sound_and_says_what_it_asked(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [tiny_llama, "--minutes", 0.1, "--clients", 4, "--sample-s", 0.5]
    monkeypatch.setattr(sys, "argv", ["server_soak", *map(str, options)])
    module = importlib.import_module("server_soak")
    assert module.main() == 0
    _, requests, memory, left = capsys.readouterr().out.strip().split("\n\n")
    assert {"stream", "whole"} <= {line.strip("| ").split(" | ")[0] for line in requests.splitlines()[2:]}
    assert all(float(cell) > 0 for line in memory.splitlines()[2:] for cell in line.strip("| ").split(" | ")[1:3])
    assert left == "left behind: {'running': 0, 'waiting': 0, 'held': 0, 'restarts': 0}; wrong replies: 0"


@pytest.mark.usefixtures("bench_modules")
def test_soak_calls_a_wrong_reply_a_fault() -> None:
    import asyncio
    import random
    import time

    import httpx
    from servers.soak_client import Found, SoakClient  # type: ignore[import-not-found]

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(500, json={"error": {"message": "broken"}})

    async def main() -> Found:
        found = Found()
        async with httpx.AsyncClient(base_url="http://none", transport=httpx.MockTransport(answer)) as http:
            await SoakClient(http, "m", found, random.Random(0)).run(time.monotonic() + 0.2)
        return found

    found = asyncio.run(main())
    assert any("whole: WrongReplyError: status 500" in fault for fault in found.faults)
    assert any("stream: WrongReplyError: status 500" in fault for fault in found.faults)
    assert found.counts["bad"] == found.counts["whole"] == found.counts["stream"] == 0


@pytest.mark.usefixtures("bench_modules")
@pytest.mark.parametrize("cluster_size", [1, 5])
@pytest.mark.parametrize(("num_items", "margin", "discordance"), [(200, 0.02, 0.05), (1000, 0.01, 0.05)])
def test_the_gate_errs_in_no_more_than_one_suite_of_twenty(
    num_items: int, margin: float, discordance: float, cluster_size: int
) -> None:
    from gate_error_rates import Case, error_rates  # type: ignore[import-not-found]

    case = Case(num_items, margin, discordance, cluster_size)
    false_pass, false_fail, right_pass = error_rates(case, num_draws=800, shared=0.5, seed=1)
    noise = 3 * (0.05 * 0.95 / 800) ** 0.5
    assert false_pass <= 0.05 + noise and false_fail <= 0.05 + noise
    assert right_pass > false_pass + 0.05  # and it does tell them apart


@pytest.mark.usefixtures("bench_modules")
def test_error_rates_are_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--items", 50, "--margins", 5, "--discordances", 0.02, 0.05, "--draws", 20]
    monkeypatch.setattr(sys, "argv", ["gate_error_rates", *map(str, options)])
    importlib.import_module("gate_error_rates").main()
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.strip("| ").split(" | ")[:4] for line in lines[4:]] == [
        ["50", "5", "5 %", "1"],
        ["50", "5", "5 %", "5"],
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("bench_modules")
def test_evals_of_both_sides_agree_and_are_timed(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        tiny_llama,
        "--suite",
        ROOT / "evals" / "quickstart",
        "--items",
        6,
        "--repeats",
        2,
        "--backend",
        "reference",
    ]
    monkeypatch.setattr(sys, "argv", ["eval_speed", "--model", *map(str, options)])
    importlib.import_module("eval_speed").main()
    row = capsys.readouterr().out.strip().splitlines()[-1].strip("| ").split(" | ")
    assert row[-1] == "0" and float(row[2].split()[0]) > 0
