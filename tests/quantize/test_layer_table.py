from quantpipe.quantize.layer_table import layer_table
from quantpipe.quantize.loop.records import LayerRecord, QuantizedModel
from quantpipe.quantize.transforms.transform import TransformRecord


def layer(name: str, before: float, after: float, damp_frac: float = 0.01) -> LayerRecord:
    return LayerRecord(name, "w4a16 g64", before, after, damp_frac, 0, 512, 1.25)


QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def test_worst_linears_come_first_with_their_figures() -> None:
    table = layer_table(QuantizedModel({}, (layer(QUERY, 0.02, 0.005), layer(DOWN, 0.03, 0.01))))
    lines = table.splitlines()
    assert "2 of 2 linears" in lines[0]
    rows = [line.split() for line in lines if ".layers." in line or " layers." in line]
    assert rows == [
        [DOWN, "w4a16", "g64", "3.00e-02", "1.00e-02", "0.01", "1.25"],
        [QUERY, "w4a16", "g64", "2.00e-02", "5.00e-03", "0.01", "1.25"],
    ]


def test_only_as_many_as_asked_for_are_shown() -> None:
    layers = tuple(layer(f"layers.{i:03d}.down_proj", 0.1, 0.001 * i) for i in range(100))
    table = layer_table(QuantizedModel({}, layers), 3)
    assert [line.split()[0] for line in table.splitlines() if "down_proj" in line] == [
        f"layers.{i:03d}.down_proj" for i in (99, 98, 97)
    ]
    assert "3 of 100 linears" in table


def test_transforms_show_what_a_linear_was_rescaled_against_or_why_not() -> None:
    transformed = (
        TransformRecord((QUERY,), "model.layers.0.input_layernorm", 0.55),
        TransformRecord((DOWN,), None, None, "no exponent lowers the output error"),
        TransformRecord((QUERY,), "model.layers.0.input_layernorm", None, detail="clipped"),
    )
    table = layer_table(QuantizedModel({}, (layer(QUERY, 0.1, 0.1), layer(DOWN, 0.1, 0.1)), transformed=transformed))
    assert "input_layernorm ^0.55; input_layernorm (clipped)" in table
    assert "no exponent lowers the output error" in table


def test_long_names_and_brackets_are_printed_whole() -> None:
    name = "language_model.model.layers.10.mlp.experts.127.[gate]_proj"
    assert name in layer_table(QuantizedModel({}, (layer(name, 0.1, 0.1, damp_frac=0.0),)))


def test_linears_without_damping_say_so() -> None:
    (row,) = [
        line for line in layer_table(QuantizedModel({}, (layer(DOWN, 0.1, 0.1, 0.0),))).splitlines() if DOWN in line
    ]
    assert row.split()[-2:] == ["-", "1.25"]
