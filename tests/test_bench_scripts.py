"""The scripts in ``bench/`` that quantize: rows are legal recipes, and the driver runs unattended to its table."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
