"""Bytes by purpose, each model in a column of its own."""

from quantpipe.reporting.exhibits import Bars, Table
from quantpipe.reporting.sections.memory import MemoryRow, memory_section


def test_each_model_has_its_bytes_and_what_one_lacks_is_left_open() -> None:
    models = (
        MemoryRow("a", {"w8a8": 5}, "int8", 2, 7, 11, {"workspace": 13}),
        MemoryRow("b", {"BF16": 10}, "auto", 4, 8, 12),
    )
    bars, table = memory_section(models).exhibits
    assert isinstance(bars, Bars) and isinstance(table, Table)
    assert [(bar.label, bar.values) for bar in bars.bars] == [("w8a8", (5.0, None)), ("BF16", (None, 10.0))]
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["KV cache, per token"] == (2, 4)
    assert rows["workspace"] == (13, None)
    assert memory_section(()).exhibits == ()
