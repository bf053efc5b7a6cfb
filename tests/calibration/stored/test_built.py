"""Blocks on disk: written whole, read back equal, refused when they changed."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quantpipe.calibration import Budget, CalibrationSet, build_calibration
from quantpipe.calibration.definition.set_definition import MANIFEST_NAME
from quantpipe.calibration.stored.built import BLOCKS_NAME, built_budget, read_built, write_built
from quantpipe.errors import DataError

Make = Callable[..., Path]
ROWS = [json.dumps({"text": f"{i:04d}" + "x" * 15}) for i in range(40)]  # 20 tokens each


def build(make_set: Make, model: Path, header: str = "") -> CalibrationSet:
    folder = make_set(ROWS)
    text = (folder / "set.yaml").read_text()
    (folder / "set.yaml").write_text(text.replace("name: tiny", f"name: tiny\n{header}"))
    return build_calibration(folder, model, Budget(10, 32))


@pytest.mark.parametrize("header", ["", "packing: separate"])
def test_what_is_read_is_what_was_built(make_set: Make, make_tokenizer: Make, tmp_path: Path, header: str) -> None:
    model = make_tokenizer()
    built = build(make_set, model, header)
    write_built(tmp_path / "out", built)
    read = read_built(tmp_path / "out", model)
    assert np.array_equal(read.token_ids, built.token_ids)
    assert (read.position_ids is None) == (built.position_ids is None)
    assert read.position_ids is None or np.array_equal(read.position_ids, built.position_ids)  # type: ignore[arg-type]
    assert (read.name, read.digest, read.is_short) == (built.name, built.digest, built.is_short)
    assert read.account == built.account
    assert read.documents == built.documents
    assert built_budget(tmp_path / "out") == Budget(10, 32)


def test_the_same_set_gives_the_same_bytes_wherever_it_lies(
    make_set: Make, make_tokenizer: Make, tmp_path: Path
) -> None:
    model, folder = make_tokenizer(), make_set(ROWS)
    write_built(tmp_path / "a", build_calibration(folder, model, Budget(10, 32)))
    folder.rename(tmp_path / "moved")
    write_built(tmp_path / "b", build_calibration(tmp_path / "moved", model, Budget(10, 32)))
    for name in (BLOCKS_NAME, MANIFEST_NAME):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted((BLOCKS_NAME, MANIFEST_NAME))


def test_changed_or_missing_blocks_are_refused(make_set: Make, make_tokenizer: Make, tmp_path: Path) -> None:
    model, out = make_tokenizer(), tmp_path / "out"
    write_built(out, build(make_set, model))
    arrays = load_file(out / BLOCKS_NAME)
    arrays["token_ids"][3, 3] += 1
    save_file(arrays, out / BLOCKS_NAME)
    with pytest.raises(DataError, match=r"differs from what calibration\.manifest\.json says"):
        read_built(out, model)
    (out / BLOCKS_NAME).write_bytes(b"")
    with pytest.raises(DataError, match="no blocks can be read here"):
        read_built(out, model)


def test_another_tokenizer_is_refused(make_set: Make, make_tokenizer: Make, tmp_path: Path) -> None:
    write_built(tmp_path / "out", build(make_set, make_tokenizer()))
    with pytest.raises(DataError, match="built with another tokenizer"):
        read_built(tmp_path / "out", make_tokenizer(template="{{ messages }}", name="other"))


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "quantpipe.calibration/1"}', '{"schema": "other/2"}'])
def test_a_file_that_is_no_manifest_is_refused(make_set: Make, make_tokenizer: Make, tmp_path: Path, text: str) -> None:
    model, out = make_tokenizer(), tmp_path / "out"
    write_built(out, build(make_set, model))
    (out / MANIFEST_NAME).write_text(text)
    with pytest.raises(DataError, match=r"build the set again$"):
        read_built(out, model)


def test_a_folder_with_other_files_is_left_alone(make_set: Make, make_tokenizer: Make, tmp_path: Path) -> None:
    built = build(make_set, make_tokenizer())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(DataError, match="holds other files"):
        write_built(tmp_path / "mine", built)
    write_built(tmp_path / "out", built)
    write_built(tmp_path / "out", built)  # over an earlier build


def test_the_manifest_names_files_rows_and_digests_and_no_text(
    make_set: Make, make_tokenizer: Make, tmp_path: Path
) -> None:
    built = build(make_set, make_tokenizer())
    write_built(tmp_path / "out", built)
    text = (tmp_path / "out" / MANIFEST_NAME).read_text()
    manifest = json.loads(text)
    assert "xxxxx" not in text
    assert str(tmp_path) not in text
    (source,) = manifest["sources"]
    assert source["files"][0]["name"] == "rows.jsonl"
    assert source["files"][0]["bytes"] == (tmp_path / "set" / "rows.jsonl").stat().st_size
    assert manifest["blocks_sha256"] == built.digest
    assert manifest["documents"][0][0] == built.documents[0].where
    assert len({row_hash for *_, row_hash in manifest["documents"]}) == len(built.documents)
