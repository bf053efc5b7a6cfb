import itertools

import pytest

from quantpipe.errors import RecipeError
from quantpipe.formats.scheme import (
    WEIGHT_ONLY_BITS,
    TensorSpec,
    WeightScheme,
    scheme_from_config_group,
    w4a16,
    w8a8,
    weight_only,
)


def test_w4a16_stores_packed_words_scales_and_shape() -> None:
    assert w4a16(32).tensors(10, 96, "BF16") == {
        "weight_packed": TensorSpec("I32", (10, 12)),
        "weight_scale": TensorSpec("BF16", (10, 3)),
        "weight_shape": TensorSpec("I64", (2,)),
    }


def test_w8a8_stores_bytes_and_one_scale_per_channel() -> None:
    assert w8a8().tensors(10, 96, "F16") == {
        "weight": TensorSpec("I8", (10, 96)),
        "weight_scale": TensorSpec("F16", (10, 1)),
    }


SCHEMES = [
    w8a8(),
    *(weight_only(*each) for each in itertools.product(WEIGHT_ONLY_BITS, (32, 128, None), (True, False))),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)
def test_declared_scheme_is_read_back_as_itself(scheme: WeightScheme) -> None:
    assert scheme_from_config_group(scheme.config_group(["Linear"])) == scheme


def test_group_size_that_does_not_divide_names_module_and_legal_sizes() -> None:
    with pytest.raises(RecipeError, match=r"128 does not divide the 576 .* layers\.0\.q_proj; use 32 or 64"):
        w4a16(128).check_fits("layers.0.q_proj", 576)


def test_width_that_no_group_size_divides_points_to_channels() -> None:
    with pytest.raises(RecipeError, match="use channel"):
        w4a16(32).check_fits("odd", 50)


@pytest.mark.parametrize(
    "change",
    [
        {"num_bits": 5},
        {"symmetric": None},
        {"strategy": "tensor"},
        {"type": "float"},
    ],
    ids=str,
)
def test_foreign_scheme_is_refused_not_misread(change: dict[str, object]) -> None:
    group = w4a16(64).config_group(["Linear"])
    group["weights"] = {**group["weights"], **change}
    with pytest.raises(RecipeError, match="is not a scheme this runtime executes"):
        scheme_from_config_group(group)


def test_static_activation_scales_are_refused() -> None:
    group = w8a8().config_group(["Linear"])
    group["input_activations"] = {**group["input_activations"], "dynamic": False}
    with pytest.raises(RecipeError, match="is not a scheme"):
        scheme_from_config_group(group)
