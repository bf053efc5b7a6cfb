"""gate.json: written whole or not at all, strict JSON, read back equal."""

import json
import math
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpipe.errors import DataError
from quantpipe.gate.judge import Measurement, Verdict, judge, judge_limits
from quantpipe.gate.limits import GateLimit, Limit, Waiver
from quantpipe.gate.record import (
    DIVERGENCE_NAME,
    GATE_NAME,
    ITEMS_NAME,
    MEASUREMENTS_NAME,
    RunContext,
    library_versions,
    machine_facts,
    read_gate_json,
    utc_now,
    withdraw_verdict,
    write_gate_json,
    write_text_atomically,
)

CONTEXT = RunContext(
    recipe_name="quickstart",
    recipe_digest="aa" * 32,
    artifact_digest="bb" * 32,
    base_digest="cc" * 32,
    base_origin="model.gguf",
    engine={"backend": "cpu", "max_num_seqs": 16, "max_model_len": None},
    versions=library_versions(),
    machine=machine_facts(),
    date=utc_now(),
)
DAY = date(2026, 12, 1)
ANY_FLOAT = st.floats(allow_nan=False)


def kl(value: float = 0.03, low: float = 0.02, high: float = 0.04) -> Measurement:
    return Measurement("mean_kl", value, low, high, 0.9, 16, "nats", "detail with | and 中文")


@settings(max_examples=50)
@given(value=ANY_FLOAT, low=ANY_FLOAT, high=ANY_FLOAT)
def test_any_result_survives_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, value: float, low: float, high: float
) -> None:
    path = tmp_path_factory.mktemp("gate") / "gate.json"
    other = Measurement("p99_kl", value, low, high, 0.9, 3, "nats")
    result = judge({"mean_kl": Limit(max=0.03), "top1_agreement": Limit(min=0.9)}, [kl(value, low, high), other])
    write_gate_json(path, result, CONTEXT)
    assert read_gate_json(path) == (result, CONTEXT)


def test_the_file_says_verdict_exit_code_and_every_check(tmp_path: Path) -> None:
    result = judge({"mean_kl": Limit(max=0.05), "perplexity_ratio": Limit(max=1.05)}, [kl()])
    write_gate_json(tmp_path / "gate.json", result, CONTEXT)
    record = json.loads((tmp_path / "gate.json").read_text(encoding="utf-8"))
    assert (record["verdict"], record["exit_code"]) == ("FAIL", 4)
    first, second = record["checks"]
    assert first["limit"] == {"max": 0.05}
    assert first["verdict"] == "PASS"
    measurement = first["measurement"]
    assert [measurement[key] for key in ("value", "low", "high", "confidence", "num_samples", "unit")] == [
        0.03, 0.02, 0.04, 0.9, 16, "nats",
    ]  # fmt: skip
    assert second["measurement"] is None
    assert "not measured" in second["reason"]
    assert record["context"]["artifact_digest"] == "bb" * 32
    assert record["context"]["engine"]["max_num_seqs"] == 16
    assert record["context"]["machine"]["cores"] >= 1
    assert record["context"]["versions"]["quantpipe"] != "not installed"


def test_nan_and_infinities_are_written_as_strict_json(tmp_path: Path) -> None:
    result = judge({"mean_kl": Limit(max=0.05)}, [kl(math.nan, -math.inf, math.inf)])
    write_gate_json(tmp_path / "gate.json", result, CONTEXT)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads((tmp_path / "gate.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert record["checks"][0]["measurement"]["value"] == "nan"
    stored = read_gate_json(tmp_path / "gate.json")[0].checks[0].measurement
    assert stored is not None
    assert math.isnan(stored.value)
    assert stored.high == math.inf


def test_limits_on_slices_waivers_and_corrections_survive_the_round_trip(tmp_path: Path) -> None:
    waiver = Waiver(reason="known", by="ann", until=date(2027, 1, 31))
    limits = [
        GateLimit(metric="mean_kl", at_most=0.01, waiver=waiver),
        GateLimit(metric="accuracy", max_drop_relative=0.03, slice={"language": "de"}, vs="previous-release"),
        GateLimit(metric="mean_kl", at_most=0.03, on_unsure="warn"),
    ]
    result = judge_limits(limits, lambda e, _: kl() if e.figure == "mean_kl" else "x", correction="holm", today=DAY)
    context = replace(CONTEXT, suite_digest="dd" * 32, engine_digest="ee" * 32, measured="2026-12-01")
    write_gate_json(tmp_path / "gate.json", result, context)
    assert read_gate_json(tmp_path / "gate.json") == (result, context)
    record = json.loads((tmp_path / "gate.json").read_text(encoding="utf-8"))
    assert record["checks"][0]["entry"]["waiver"] == {"reason": "known", "by": "ann", "until": "2027-01-31"}
    assert [check["is_waived"] for check in record["checks"]] == [True, False, False]


def test_record_that_claims_a_waiver_it_does_not_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gate.json"
    write_gate_json(path, judge({"mean_kl": Limit(max=0.01)}, [kl()]), CONTEXT)
    text = path.read_text(encoding="utf-8").replace('"is_waived": false', '"is_waived": true')
    path.write_text(text.replace('"FAIL",\n  "exit_code"', '"PASS",\n  "exit_code"'), encoding="utf-8")
    with pytest.raises(DataError, match="mean_kl is waived without a waiver"):
        read_gate_json(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace("quantpipe.gate/1", "quantpipe.gate/9"),
        lambda text: text.replace('"verdict": "PASS",\n  "exit_code"', '"verdict": "UNSURE",\n  "exit_code"'),
        lambda text: text.replace('"max"', '"maximum"'),
        lambda text: text.replace('"num_samples"', '"n"'),
    ],
)
def test_a_damaged_or_contradictory_record_is_refused_in_one_line(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "gate.json"
    write_gate_json(path, judge({"mean_kl": Limit(max=0.05)}, [kl()]), CONTEXT)
    text = path.read_text(encoding="utf-8")
    assert damage(text) != text
    path.write_text(damage(text), encoding="utf-8")
    with pytest.raises(DataError, match=r"gate\.json: ") as error:
        read_gate_json(path)
    assert "\n" not in str(error.value)


def test_a_missing_record_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_gate_json(tmp_path / "gate.json")


def test_a_failed_write_keeps_the_old_file_and_leaves_no_partial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gate.json"
    write_text_atomically(path, "old")

    def full_disk(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(DataError, match="No space left on device"):
        write_text_atomically(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["gate.json"]


def test_a_folder_in_the_way_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="cannot be written"):
        write_text_atomically(tmp_path / "file" / "gate.json", "x")


def test_versions_say_what_is_not_installed() -> None:
    versions = library_versions(("quantpipe", "no-such-distribution"))
    assert versions["no-such-distribution"] == "not installed"
    assert versions["python"].startswith("3.")


def test_verdicts_are_plain_strings_in_the_record() -> None:
    assert json.dumps(Verdict.PASS) == '"PASS"'


def test_a_withdrawn_verdict_leaves_nothing_that_was_measured(tmp_path: Path) -> None:
    for name in (GATE_NAME, MEASUREMENTS_NAME, ITEMS_NAME, DIVERGENCE_NAME):
        (tmp_path / name).touch()
    withdraw_verdict(tmp_path)
    assert not list(tmp_path.iterdir())
