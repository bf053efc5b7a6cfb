"""Fields of a config.json that hold another kind of value than any reader can use are refused by file and name."""

from pathlib import Path
from typing import Any

import pytest

from quantpipe.errors import ArtifactError
from quantpipe.formats.config_kinds import (
    FLAGS,
    MAPPINGS,
    MOST,
    NAMES,
    NUMBERS,
    SIZES,
    TOKENS,
    WIDTHS,
    check_kinds,
    check_num_layers,
)

PATH = Path("model/config.json")
NAN, INF = float("nan"), float("inf")
BAD: list[tuple[tuple[str, ...], list[Any]]] = [
    (("model_type",), [0, 1.5, True, [], ["llama"], {}]),
    (SIZES, [0, -1, 2.5, NAN, INF, "4", "", True, False, [], [0], ["4"], {}, MOST + 1, 10**30]),
    (NUMBERS, [0, -1, NAN, INF, "1e-5", True, [], {}]),
    (FLAGS, [0, 1, "true", "false", [], {}]),
    (MAPPINGS, [0, "linear", True, [], [1]]),
    (NAMES, [0, "full_attention", True, {}, [1], [None], [["x"]]]),
    (TOKENS, [1.5, "2", True, {}, ["2"], [[2]], [None], 10**30]),
]


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for keys, values in BAD for key in keys for value in values], ids=repr
)
def test_a_value_of_the_wrong_kind_is_named_with_file_and_key(key: str, value: Any) -> None:
    with pytest.raises(ArtifactError) as caught:
        check_kinds(PATH, {"model_type": "llama", key: value})
    text = str(caught.value)
    assert text.startswith(f"model/config.json: {key}: ")
    assert " is not " in text and "\n" not in text and len(text) < 200


@pytest.mark.parametrize(
    "config",
    [
        {},
        dict.fromkeys(("model_type", *SIZES, *NUMBERS, *FLAGS, *MAPPINGS, *NAMES, *TOKENS)),
        {"head_dim": 1, "vocab_size": MOST, "num_key_value_heads": [4, 2], "rope_theta": 10000, "rms_norm_eps": 1e-6},
        {"eos_token_id": [1, 2], "bos_token_id": 0, "pad_token_id": -1, "layer_types": [], "rope_scaling": {}},
        {"unknown": object()},
    ],
)
def test_what_some_model_has_is_let_pass(config: dict[str, Any]) -> None:
    check_kinds(PATH, config)


def test_more_layers_than_tensors_cannot_be() -> None:
    check_num_layers(PATH, {"num_hidden_layers": 3}, 3)
    check_num_layers(PATH, {"num_hidden_layers": 3}, 0)
    with pytest.raises(ArtifactError, match=r"num_hidden_layers: 1,000,000,000 layers, and the folder holds 3 tensors"):
        check_num_layers(PATH, {"num_hidden_layers": 10**9}, 3)


@pytest.mark.parametrize("key", WIDTHS)
def test_a_width_that_no_model_has_is_refused_before_anything_is_made_of_it(key: str) -> None:
    with pytest.raises(ArtifactError, match=rf"^model/config.json: {key}: 1,000,000,000 is more than any model has; "):
        check_kinds(PATH, {key: 10**9})
