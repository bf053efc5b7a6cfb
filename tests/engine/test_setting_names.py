"""Settings are called in refusals as they were given."""

import dataclasses
from contextlib import AbstractContextManager

import pytest

from quantpipe.engine.config import OTHER_NAMES, EngineConfig
from quantpipe.engine.setting_names import calling_settings
from quantpipe.errors import ArtifactError, QuantpipeError, RecipeError, RequestError


@pytest.mark.parametrize("error", [RecipeError, ArtifactError, RequestError])
def test_every_setting_in_a_refusal_is_renamed_and_its_kind_stays(error: type[QuantpipeError]) -> None:
    with pytest.raises(error, match=r"^--block-size: 3; lower --max-num-seqs or it$") as caught, naming():
        raise error("engine.block_size: 3; lower engine.max_num_seqs or it")
    assert caught.value.exit_code == error.exit_code


def naming() -> AbstractContextManager[None]:
    return calling_settings(lambda name: f"--{name.replace('_', '-')}")


def test_the_parameter_of_a_request_is_kept() -> None:
    with pytest.raises(RequestError) as caught, calling_settings(str):
        raise RequestError("n: 5; raise engine.max_num_seqs", "n")
    assert (str(caught.value), caught.value.param) == ("n: 5; raise max_num_seqs", "n")


def test_what_names_no_setting_is_raised_as_it_is() -> None:
    error = RecipeError("model: no such folder")
    with pytest.raises(RecipeError) as caught, calling_settings(str):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_from_elsewhere_lead_to_a_setting(name: str) -> None:
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert name not in names and OTHER_NAMES[name] in names
    with pytest.raises(RecipeError, match=rf"engine\.{name}: unknown setting; did you mean '{OTHER_NAMES[name]}'\?"):
        EngineConfig.of({name: 1})
