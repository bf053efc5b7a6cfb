import json
from pathlib import Path

import pytest

from quantpipe.calibration.definition.set_definition import SetDefinition, load_set
from quantpipe.calibration.views.overview import overview, overview_table
from quantpipe.errors import DataError

SET = """
version: 1
name: shop
sources:
  - path: chats.csv
    fields: {prompt: question, response: answer}
    filter: {min_chars: 6}
  - path: notes.jsonl
    limit: 2
"""


@pytest.fixture
def shop(tmp_path: Path) -> SetDefinition:
    (tmp_path / "set.yaml").write_text(SET)
    (tmp_path / "chats.csv").write_text("question,answer\nWhere is it?,Here\nWhen?,Never\na,b\n")
    notes = [{"text": f"note {number} for mia@example.com"} for number in range(5)]
    (tmp_path / "notes.jsonl").write_text("".join(json.dumps(note) + "\n" for note in notes))
    return load_set(tmp_path)


def test_rows_and_characters_are_counted_without_a_tokenizer(shop: SetDefinition) -> None:
    chats, notes = overview(shop).sources
    assert (chats.num_rows, chats.num_samples, dict(chats.dropped)) == (3, 2, {"filtered": 1})
    assert chats.num_chars == len("Where is it?\nHere") + len("When?\nNever")
    assert (notes.num_rows, notes.is_limited) == (2, True)


def test_the_table_names_fields_and_what_was_left_out(shop: SetDefinition) -> None:
    lines = overview_table(overview(shop).sources).splitlines()
    assert lines[0].split() == ["source", "rows", "usable", "characters", "mean"]
    assert lines[1].split() == ["chats.csv", "3", "2", "28", "14"]
    assert lines[2:4] == ["  fields: prompt: question, response: answer", "  dropped: 1 filtered"]
    assert lines[-1] == "  limit: rows after it were not read"


def test_shown_rows_take_turns_between_sources_and_are_redacted(shop: SetDefinition) -> None:
    shown = overview(shop, num_shown=3).shown
    assert [each.title.partition(":")[0].rpartition("/")[2] for each in shown] == [
        "chats.csv",
        "notes.jsonl",
        "chats.csv",
    ]
    assert "mia@" not in str(shown) and "<EMAIL_" in str(shown)
    assert overview(shop).shown == ()


def test_rows_that_cannot_be_used_are_refused_as_in_a_build(shop: SetDefinition) -> None:
    with (shop.folder / "chats.csv").open("a") as file:
        file.write(",nothing\n")
    with pytest.raises(DataError, match=r"chats\.csv:5: .*empty"):
        overview(shop)
