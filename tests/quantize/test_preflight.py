import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from architectures import MakeModel

from quantpipe.errors import DataError
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.artifact_writer import write_artifact
from quantpipe.quantize.preflight import check_save


def base_with(folder: Path, tmp_path: Path, text: str, name: str = "generation_config.json") -> Artifact:
    copied = shutil.copytree(folder, tmp_path / "base")
    (copied / name).write_text(text)
    return Artifact.open(copied)


@pytest.mark.parametrize("settings", [{"max_new_tokens": -3}, {"num_return_sequences": 3}])
def test_generation_settings_that_transformers_does_not_load_are_found_beforehand(
    tiny_model: MakeModel, tmp_path: Path, settings: dict[str, Any]
) -> None:
    base = base_with(tiny_model("llama"), tmp_path, json.dumps(settings))
    with pytest.raises(
        DataError, match=r"generation_config\.json: transformers would not load an artifact with it: .*; fix it"
    ):
        check_save(tmp_path / "out" / "artifact", base)


def test_a_temperature_without_sampling_passes_and_the_artifact_loads_with_it(
    tiny_model: MakeModel, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    base = base_with(tiny_model("llama"), tmp_path, json.dumps({"temperature": 0.6, "do_sample": False}))
    check_save(tmp_path / "out" / "artifact", base)
    assert not (tmp_path / "out").exists()
    written = write_artifact(tmp_path / "out" / "artifact", base, {}, None, {})
    assert AutoModelForCausalLM.from_pretrained(written.folder).generation_config.temperature == 0.6


def test_a_damaged_companion_file_is_found_beforehand(tiny_model: MakeModel, tmp_path: Path) -> None:
    base = base_with(tiny_model("llama"), tmp_path, "{half", "special_tokens_map.json")
    with pytest.raises(DataError, match=r"special_tokens_map\.json: not readable as JSON"):
        check_save(tmp_path / "out" / "artifact", base)


def test_a_place_that_cannot_be_written_is_found_beforehand(tiny_model: MakeModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be written: .*; choose another"):
        check_save(tmp_path / "file" / "artifact", Artifact.open(tiny_model("llama")))
