"""The linears that quantization hurt most, as a table for people."""

from io import StringIO

from quantpipe.quantize.loop.records import LayerRecord, QuantizedModel
from quantpipe.quantize.transforms.transform import TransformRecord

NUM_LINEARS = 12
# Rich would break lines to the width of whatever runs it; a table that is passed on as text has one of its own.
_MAX_WIDTH = 160


def layer_table(quantized: QuantizedModel, num_linears: int = NUM_LINEARS) -> str:
    """The ``num_linears`` linears with the largest error that is left, worst first, and what was done to each.

    Errors are relative squared errors of a linear's output: before is round to nearest with absmax scales, after is
    what was stored. Under transforms stands the module that a linear was rescaled against, with the exponent; or why
    it was left alone.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    worst = sorted(quantized.layers, key=lambda layer: (-layer.error_after, layer.name))[:num_linears]
    transformed = _by_linear(quantized)
    left, right = ["linear", "scheme"], ["before", "after", "damping", "seconds"]
    headings = [*left, *right, *(["transforms"] if transformed else [])]
    title = f"Largest errors left, {len(worst)} of {len(quantized.layers)} linears"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", no_wrap=True)
    for layer in worst:
        cells = [*_cells(layer), *(["; ".join(transformed.get(layer.name, ["-"]))] if transformed else [])]
        table.add_row(*(Text(cell) for cell in cells))
    text = StringIO()
    Console(file=text, width=_MAX_WIDTH, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def _cells(layer: LayerRecord) -> list[str]:
    damping = f"{layer.damp_frac:.3g}" if layer.damp_frac else "-"
    errors = [f"{error:.2e}" for error in (layer.error_before, layer.error_after)]
    return [layer.name, layer.scheme, *errors, damping, f"{layer.seconds:.2f}"]


def _by_linear(quantized: QuantizedModel) -> dict[str, list[str]]:
    """What transforms did to each linear, in their order."""
    done: dict[str, list[str]] = {}
    for record in quantized.transformed:
        for name in record.linears:
            done.setdefault(name, []).append(_shown(record))
    return done


def _shown(record: TransformRecord) -> str:
    if record.producer is None:
        return record.reason or record.detail or "left as it is"
    against = record.producer.rpartition(".")[2]
    alpha = "" if record.alpha is None else f" ^{record.alpha:g}"
    return f"{against}{alpha}" + (f" ({record.detail})" if record.detail else "")
