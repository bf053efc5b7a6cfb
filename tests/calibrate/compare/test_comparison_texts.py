import json
from pathlib import Path

import pytest

from quantpipe.calibrate.compare.comparison_texts import HeldOutText, Wanted, domain_texts, named_sets
from quantpipe.calibration.definition.set_definition import SetDefinition
from quantpipe.errors import DataError, RecipeError
from quantpipe.report import no_progress

SET = """
version: 1
name: {name}
{keys}
sources:
  - path: rows.jsonl
    fields: {{text: text}}
    domain: {domain}
"""


def write_set(folder: Path, name: str, keys: str = "holdout: {frac: 0.5}", domain: str = "{field: topic}") -> Path:
    folder.mkdir()
    (folder / "set.yaml").write_text(SET.format(name=name, keys=keys, domain=domain))
    rows = [
        {"text": f"{name} row {row}: " + " ".join(f"word{(row * 7 + i) % 101}" for i in range(30)), "topic": topic}
        for row, topic in enumerate(["bank", "bank", "bank", "law"] * 10)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def texts_of(
    sets: dict[str, SetDefinition], tiny_llama: Path, wanted: Wanted
) -> tuple[dict[str, HeldOutText], list[tuple[str, bool]]]:
    found, texts = domain_texts(sets, wanted, tiny_llama, None, no_progress)
    return {text.label: text for text in found}, [(text.set, text.is_held_out) for text in texts]


def test_sets_are_compared_on_what_each_holds_out_domain_by_domain(tmp_path: Path, tiny_llama: Path) -> None:
    sets = named_sets([write_set(tmp_path / "a", "one"), write_set(tmp_path / "b", "two", keys="")])
    found, texts = texts_of(sets, tiny_llama, Wanted({}, 6, 32))
    assert {label: len(text.windows) for label, text in found.items()} == {"bank": 3, "law": 3}
    assert all(len(window) == 32 for text in found.values() for window in text.windows)
    assert {text.origin for text in found.values()} == {"rows held out by one"}
    assert set(texts) == {("held-out rows of one", True)}


def test_a_domain_that_two_sets_hold_out_is_named_after_the_set(tmp_path: Path, tiny_llama: Path) -> None:
    sets = named_sets([write_set(tmp_path / "a", "one"), write_set(tmp_path / "b", "two", domain="bank")])
    found, _ = texts_of(sets, tiny_llama, Wanted({}, 4, 32))
    assert set(found) == {"one: bank", "two: bank", "law"}


def test_domains_with_too_few_windows_are_measured_together(tmp_path: Path, tiny_llama: Path) -> None:
    sets = named_sets([write_set(tmp_path / "a", "one"), write_set(tmp_path / "b", "two", keys="")])
    found, _ = texts_of(sets, tiny_llama, Wanted({}, 2, 32))
    assert {label: len(text.windows) for label, text in found.items()} == {"one: several domains": 2}


def test_named_texts_are_used_instead_and_no_row_may_repeat_them(tmp_path: Path, tiny_llama: Path) -> None:
    sets = named_sets([write_set(tmp_path / "a", "one"), write_set(tmp_path / "b", "two")])
    text = tmp_path / "held_out.txt"
    text.write_text(" ".join(f"other{i}" for i in range(200)))
    found, texts = texts_of(sets, tiny_llama, Wanted({"prose": text}, 3, 20))
    assert list(found) == ["prose"] and len(found["prose"].windows) == 3
    assert set(texts) == {(str(text), False)}
    with pytest.raises(DataError, match="windows of 900 tokens; 3 are needed"):
        texts_of(sets, tiny_llama, Wanted({"prose": text}, 3, 900))


def test_nothing_to_compare_on_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    sets = named_sets([write_set(tmp_path / "a", "one", keys=""), write_set(tmp_path / "b", "two", keys="")])
    with pytest.raises(RecipeError, match="none of one, two holds rows out; add holdout"):
        texts_of(sets, tiny_llama, Wanted({}))


def test_blocks_that_were_built_are_no_set_to_compare(tmp_path: Path) -> None:
    built = tmp_path / "built"
    built.mkdir()
    (built / "calibration.manifest.json").write_text("{}")
    with pytest.raises(RecipeError, match="holds blocks, which no seed changes"):
        named_sets([built, write_set(tmp_path / "a", "one")])


def test_a_file_that_a_set_lacks_is_named_with_its_line(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "set.yaml").write_text(f"version: 1\nname: {name}\nsources: [{{path: gone.csv}}]\n")
    with pytest.raises(DataError, match=r"a/set\.yaml:3:18: \S+/gone\.csv: no such file; correct the path"):
        named_sets([tmp_path / "a", tmp_path / "b"])
