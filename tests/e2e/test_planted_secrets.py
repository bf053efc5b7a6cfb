"""Personal data planted in the sources of a set: built, shown, calibrated on, and then looked for everywhere."""

import csv
import heapq
import json
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quantpipe import cli
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import EXIT_GATE_FAILED, EXIT_PASS, EXIT_UNSURE

EMAIL = "petra.planted@mail-7731.example.org"
CARD = "4539578763621486"
CARD_IN_GROUPS = "4539 5787 6362 1486"
KEY = "AKIAPLANTED7Q2ZXW3V4"
COLUMN = "Planted-Lane 17"  # an address: no rule finds it, so its column is dropped
PATTERN = "ORD-55512349"
SECRETS = (EMAIL, "petra.planted", CARD, CARD_IN_GROUPS, KEY, COLUMN, PATTERN)

SET = """
version: 1
name: planted
redact: {patterns: {order_id: 'ORD-[0-9]{8}'}}
sources:
  - path: tickets.csv
    fields: {prompt: question, response: answer}
    template: tokenizer
    group: customer
    max_group_frac: 1.0
    drop_columns: [address]
  - path: chats.jsonl
    fields: {messages: messages}
  - path: notes.parquet
    fields: {text: note}
"""

RECIPE = """
version: 1
name: planted
model: {model}
calibration: {{set: set, num_sequences: 8, sequence_length: 64}}
quantize: {{solver: gptq, scheme: {{name: w4a16, group_size: 64}}}}
engine: {{num_threads: 1, max_model_len: 512}}
bench: {{concurrency: [1], prompt_tokens: 8, new_tokens: 2, repeats: 2}}
gate: {{tpot_ratio_c1: {{max: 100}}}}
output: run
"""


def texts() -> Iterator[str]:
    """Different texts, each with everything that must be replaced."""
    for module in (heapq, textwrap):
        for number, part in enumerate(Path(str(module.__file__)).read_text(encoding="utf-8").split("\n\n")):
            card = CARD if number % 2 else CARD_IN_GROUPS
            yield f"{part[:150]}\nwrite to {EMAIL} about {PATTERN}, card {card}, key {KEY}"


@pytest.fixture
def project(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe and a set of three sources under ``tmp_path/project``; caches and temporary files stay in tmp_path."""
    import pyarrow as pa
    from pyarrow import parquet

    for name in ("tmp", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("QUANTPIPE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "project"
    (folder / "set").mkdir(parents=True)
    (folder / "set" / "set.yaml").write_text(SET)
    (folder / "recipe.yaml").write_text(RECIPE.format(model=tiny_llama))
    rows = list(texts())[:60]
    with (folder / "set" / "tickets.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["customer", "address", "question", "answer"])
        writer.writerows([EMAIL, COLUMN, row, f"We wrote to {EMAIL}."] for row in rows[:20])
    chats = [
        {"messages": [{"role": "user", "content": row}, {"role": "assistant", "content": KEY}]} for row in rows[20:40]
    ]
    (folder / "set" / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    parquet.write_table(pa.table({"note": rows[40:60]}), folder / "set" / "notes.parquet")
    return folder


def library_caches() -> Iterator[Path]:
    import datasets
    from huggingface_hub import constants

    yield Path(datasets.config.HF_CACHE_HOME)
    yield Path(constants.HF_HOME)


def files_with_secrets(*folders: Path, since_s: float = 0.0) -> list[str]:
    """Every file in which one of the planted values stands, as it is or split by JSON's escapes."""
    found = []
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.stat().st_mtime >= since_s:
                content = path.read_bytes()
                found += [f"{path}: {secret}" for secret in SECRETS if secret.encode() in content]
    return found


@pytest.mark.slow
def test_planted_values_appear_in_no_file_and_no_output(
    project: Path, tmp_path: Path, tiny_llama: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    started_s = time.time()
    recipe, built = str(project / "recipe.yaml"), tmp_path / "built"
    calibration_set = str(project / "set")
    assert cli.run(["calibrate", "build", "--recipe", recipe, "--out", str(built)]) == 0
    assert cli.run(["calibrate", "inspect", calibration_set, "--model", str(tiny_llama), "--show", "30"]) == 0
    assert cli.run(["calibrate", "inspect", calibration_set, "--show", "30"]) == 0
    assert cli.run(["run", recipe]) in (EXIT_PASS, EXIT_GATE_FAILED, EXIT_UNSURE)  # how fast it is matters not here
    out, err = capfd.readouterr()
    printed = out + err + caplog.text
    assert [secret for secret in SECRETS if secret in printed] == []
    assert "<EMAIL_" in out and "<BANK_CARD_" in out and "<API_KEY_" in out and "<ORDER_ID_" in out
    kept = [tmp_path / "tmp", tmp_path / "cache", built, project / "run"]
    assert files_with_secrets(*kept) == []
    assert files_with_secrets(*library_caches(), since_s=started_s) == []
    beside = {path for path in (project / "set").iterdir()}
    assert {path.name for path in beside} == {"set.yaml", "tickets.csv", "chats.jsonl", "notes.parquet"}
    assert len(files_with_secrets(project / "set")) >= len(SECRETS)  # the search itself works


def test_planted_values_are_in_no_token_block(project: Path, tmp_path: Path, tiny_llama: Path) -> None:
    from safetensors.numpy import load_file

    built = tmp_path / "built"
    assert cli.run(["calibrate", "build", "--recipe", str(project / "recipe.yaml"), "--out", str(built)]) == 0
    token_ids = load_file(built / "blocks.safetensors")["token_ids"]
    text = Tokenizer.open(tiny_llama).decode(np.ravel(token_ids).tolist(), skip_special_tokens=False)
    assert [secret for secret in SECRETS if secret in text] == []
    assert "<EMAIL_" in text


@pytest.mark.parametrize(
    "line",
    [
        f'{{"messages": [{{"role": "user", "content": "{EMAIL}"',  # cut off
        f'{{"messages": [{{"content": "{EMAIL} {KEY}"}}]}}',  # nobody speaks
        f'{{"messages": [{{"role": "{EMAIL}", "content": "{KEY}"}}]}}',  # a speaker nobody knows
        f'{{"messages": "{EMAIL} {KEY}"}}',
        f'{{"{EMAIL}": "{KEY}"}}',
        f'["{EMAIL}", "{KEY}"]',
    ],
)
def test_errors_name_the_row_and_never_what_it_says(
    project: Path, tiny_llama: Path, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = project / "set" / "chats.jsonl"
    path.write_text(path.read_text() + line + "\n")
    assert cli.run(["--debug", "calibrate", "build", str(project / "set"), "--model", str(tiny_llama)]) == 3
    out, err = capfd.readouterr()
    assert [secret for secret in SECRETS if secret in out + err] == []
    assert "chats.jsonl:21" in err
