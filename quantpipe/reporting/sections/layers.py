"""What quantization cost each linear, by block and kind: from the manifest of the artifact."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quantpipe.reporting.exhibits import Bar, Bars, Column, Exhibit, Panel, Panels, Table
from quantpipe.reporting.report import ReportSection

MOST_PANELS = 24
NUM_WORST = 12
_BLOCK = re.compile(r"^(?P<before>.*?)\.(?P<block>\d+)\.(?P<kind>.+)$")
NOTE = (
    "Relative squared error of the linear's output on the calibration tokens, of its weights where nothing was "
    "calibrated: 0 is lossless, 1 as bad as no weights. Before: rounded to nearest with absmax scales. After: stored. "
    "Where a kind has several linears in a block, such as experts, the largest counts."
)


def layers_section(manifest: Mapping[str, Any]) -> ReportSection:
    """Errors by layer; without quantized linears it has no exhibits."""
    layers: Sequence[Mapping[str, Any]] = manifest.get("layers") or ()
    if not layers:
        return ReportSection("layers", "Errors by layer", if_empty="No linear was quantized.")
    exhibits: list[Exhibit] = []
    if panels := _panels(layers):
        series = ("before", "after")
        exhibits.append(Panels("Error by block and kind of linear", "linear", "block", series, panels, note=NOTE))
    exhibits.append(_worst(layers))
    if modes := manifest.get("kv_errors"):
        bars = tuple(Bar(name, (mode["mean_error"], mode["worst_error"])) for name, mode in modes.items())
        note = (
            f"Of attention's output, by how keys and values are kept; this artifact keeps {manifest.get('kv_cache')}."
        )
        exhibits.append(Bars("Error of KV cache modes", "mode", ("mean", "worst layer"), bars, note=note))
    return ReportSection("layers", "Errors by layer", tuple(exhibits))


def _panels(layers: Sequence[Mapping[str, Any]]) -> tuple[Panel, ...]:
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for layer in layers:
        match = _BLOCK.match(str(layer["name"]))
        if match is None:
            continue  # an output head lies in no block; it is in the table
        kind = re.sub(r"\.\d+\.", ".*.", match["kind"])
        before, after = found.setdefault(kind, {}).get(int(match["block"]), (0.0, 0.0))
        errors = (max(before, float(layer["error_before"])), max(after, float(layer["error_after"])))
        found[kind][int(match["block"])] = errors
    panels = []
    for kind, by_block in list(found.items())[:MOST_PANELS]:
        blocks = tuple(sorted(by_block))
        columns = tuple(tuple(by_block[block][index] for block in blocks) for index in (0, 1))
        panels.append(Panel(kind, blocks, columns))
    return tuple(panels)


def _worst(layers: Sequence[Mapping[str, Any]]) -> Table:
    worst = sorted(layers, key=lambda layer: (-layer["error_after"], layer["name"]))[:NUM_WORST]
    columns = (Column("linear"), Column("scheme"), Column("before", "scientific"), Column("after", "scientific"))
    rows = tuple((each["name"], each["scheme"], each["error_before"], each["error_after"]) for each in worst)
    return Table(f"Largest errors left, {len(worst)} of {len(layers)} linears", columns, rows)
