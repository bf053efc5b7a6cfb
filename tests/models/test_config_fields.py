"""Fields of a config.json are read strictly: what is no number of the right kind is an error that names it."""

import json
from pathlib import Path
from typing import Any

import pytest

from quantpipe.errors import ArtifactError
from quantpipe.formats.artifact import Artifact
from quantpipe.models.config_fields import (
    eos_token_ids,
    optional_int,
    positive_number,
    require_value,
    required_int,
)


def artifact_with(folder: Path = Path("model"), **config: Any) -> Artifact:
    return Artifact(folder, config, None, {})


@pytest.mark.parametrize("value", [0, -1, 2.5, "4", True, None])
def test_what_is_no_positive_whole_number_is_refused(value: object) -> None:
    with pytest.raises(ArtifactError, match=r"model/config\.json: size: .* is not a positive whole number"):
        required_int(artifact_with(size=value), "size")


def test_an_optional_number_may_be_null_or_left_out_but_not_wrong() -> None:
    assert optional_int(artifact_with(), "window", 8) == 8
    assert optional_int(artifact_with(window=None), "window", 8) is None
    assert optional_int(artifact_with(window=4), "window", None) == 4
    with pytest.raises(ArtifactError, match="window: 0 is not a positive whole number"):
        optional_int(artifact_with(window=0), "window", 8)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "1e-6", None, True])
def test_what_is_no_number_above_zero_is_refused(value: object) -> None:
    assert positive_number(artifact_with(), "eps", 1e-6) == 1e-6
    with pytest.raises(ArtifactError, match=r"eps: .* is not a number above 0"):
        positive_number(artifact_with(eps=value), "eps", 1e-6)


def test_a_value_that_is_not_executed_is_refused_with_the_one_that_is() -> None:
    require_value(artifact_with(), "softcap", None, None)
    with pytest.raises(ArtifactError, match=r"softcap 30\.0 is not supported by this runtime \(known: None\)"):
        require_value(artifact_with(), "softcap", 30.0, None)


def test_stop_tokens_are_joined_without_repeats(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [106, 1]}), encoding="utf-8")
    assert eos_token_ids(artifact_with(tmp_path, eos_token_id=1)) == (1, 106)
    assert eos_token_ids(artifact_with(tmp_path / "absent")) == ()
