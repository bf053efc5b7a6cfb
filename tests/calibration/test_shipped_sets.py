"""The sets in ``calibration/``: complete, varied, and large enough for what the recipes ask."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantpipe.calibration import Budget, build_calibration, load_set

SETS = Path(__file__).parents[2] / "calibration"
NUM_SHARED = 8  # words in a row that no two English dialogues may share; 16 characters in Chinese


DIALOGUES = ("customer_service", "finance", "medical")


@pytest.fixture(scope="module", params=DIALOGUES)
def dialogues(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    rows = (SETS / request.param / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(row) for row in rows]


def test_dialogues_are_enough_in_both_languages_and_over_many_subjects(dialogues: list[dict[str, Any]]) -> None:
    languages = Counter(row["language"] for row in dialogues)
    assert set(languages) == {"en", "zh"}
    assert languages.total() >= 200
    assert languages["zh"] >= 90
    assert len({row["domain"] for row in dialogues}) >= 15


def test_dialogues_alternate_after_their_system_message_and_end_with_an_answer(
    dialogues: list[dict[str, Any]],
) -> None:
    for row in dialogues:
        assert set(row) == {"messages", "language", "domain"}
        roles = [message["role"] for message in row["messages"]]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert 2 <= len(turns) <= 8


def test_no_two_dialogues_share_a_phrase(dialogues: list[dict[str, Any]]) -> None:
    rows_with: defaultdict[tuple[str, ...], set[int]] = defaultdict(set)
    for number, row in enumerate(dialogues, start=1):
        text = " ".join(message["content"] for message in row["messages"]).lower()
        units = text.split() if row["language"] == "en" else [char for char in text if char.isalnum()]
        size = NUM_SHARED if row["language"] == "en" else 2 * NUM_SHARED
        for start in range(len(units) - size + 1):
            rows_with[tuple(units[start : start + size])].add(number)
    assert [sorted(numbers) for numbers in rows_with.values() if len(numbers) > 1] == []


@pytest.mark.parametrize("name", [*DIALOGUES, "code_docs"])
def test_shipped_set_fills_64_sequences_of_512(name: str, make_tokenizer: Callable[..., Path]) -> None:
    built = build_calibration(SETS / name, make_tokenizer(), Budget(64, 512))
    assert built.token_ids.shape == (64, 512)
    assert built.notes == ()
    assert all(source.num_samples_used > 0 for source in built.account)


def test_every_set_has_a_definition_and_a_card() -> None:
    folders = [folder for folder in SETS.iterdir() if folder.is_dir()]
    assert len(folders) >= 2
    for folder in folders:
        assert load_set(folder).name == folder.name
        assert "## Limits" in (folder / "README.md").read_text(encoding="utf-8")
