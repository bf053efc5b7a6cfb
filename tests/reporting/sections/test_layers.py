"""Errors of a manifest by block and kind of linear."""

from reports import MANIFEST

from quantpipe.reporting.exhibits import Panels, Table
from quantpipe.reporting.sections.layers import layers_section


def layer(name: str, after: float) -> dict[str, object]:
    return {"name": name, "scheme": "w8a8", "error_before": 2 * after, "error_after": after}


def panels_of(manifest: dict[str, object]) -> Panels:
    [panels] = [each for each in layers_section(manifest).exhibits if isinstance(each, Panels)]
    return panels


def test_each_kind_of_linear_has_a_panel_over_the_blocks() -> None:
    panels = panels_of(MANIFEST)
    assert [panel.name for panel in panels.panels] == ["self_attn.q_proj", "mlp.down_proj"]
    assert panels.panels[0].positions == (0, 1, 2)
    assert panels.panels[0].values == ((2e-4, 4e-4, 2e-4 * 3), (1e-4, 2e-4, 1e-4 * 3))


def test_of_the_experts_of_a_block_the_worst_counts() -> None:
    layers = [layer(f"model.layers.0.mlp.experts.{n}.w1", error) for n, error in enumerate((0.1, 0.3, 0.2))]
    [panel] = panels_of({"layers": layers}).panels
    assert (panel.name, panel.values) == ("mlp.experts.*.w1", ((0.6,), (0.3,)))


def test_a_head_outside_the_blocks_is_in_the_table() -> None:
    section = layers_section({"layers": [layer("lm_head", 0.1)]})
    assert [type(each) for each in section.exhibits] == [Table]
    assert "lm_head" in str(section)


def test_a_folder_without_a_manifest_has_none() -> None:
    assert layers_section({}).exhibits == ()
