"""What each model takes: weights by scheme, keys and values per token, and the engine that held both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quantpipe.reporting.exhibits import Bar, Bars, Cell, Column, Table
from quantpipe.reporting.report import ReportSection


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one model as an engine holds it. ``stored`` are those of its weights on disk, by scheme."""

    engine: str
    stored: Mapping[str, int]
    kv_dtype: str
    kv_bytes_per_token: int
    weight_bytes: int
    kv_cache_bytes: int
    other: Mapping[str, int] = field(default_factory=dict)


def memory_section(models: Sequence[MemoryRow]) -> ReportSection:
    """The memory of each model."""
    if not models:
        return ReportSection("memory", "Memory")
    schemes = dict.fromkeys(name for model in models for name in model.stored)
    stored = tuple(Bar(name, tuple(_float(model.stored.get(name)) for model in models)) for name in schemes)
    return ReportSection(
        "memory",
        "Memory",
        (
            Bars("Stored weights by scheme", "scheme", tuple(m.engine for m in models), stored, form="bytes"),
            _table(models),
        ),
    )


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)


def _table(models: Sequence[MemoryRow]) -> Table:
    lines: list[tuple[str, list[Cell]]] = [
        ("stored weights", [sum(model.stored.values()) for model in models]),
        ("weights in the engine", [model.weight_bytes for model in models]),
        ("KV cache, per token", [model.kv_bytes_per_token for model in models]),
        ("KV cache, whole", [model.kv_cache_bytes for model in models]),
    ]
    for name in dict.fromkeys(name for model in models for name in model.other):
        lines.append((name, [model.other.get(name) for model in models]))
    kept = ", ".join(f"{model.engine}: {model.kv_dtype}" for model in models)
    columns = (Column("memory"), *(Column(model.engine, "bytes") for model in models))
    return Table("Memory", columns, tuple((name, *values) for name, values in lines), f"KV cache mode of {kept}.")
