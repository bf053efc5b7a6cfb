"""Latency and throughput of both engines over concurrency."""

from collections.abc import Callable, Sequence

from quantpipe.gate.report import BenchRow
from quantpipe.reporting.exhibits import Column, Curve, Curves, Form, Point, Table
from quantpipe.reporting.report import ReportSection

COLUMNS = (
    Column("engine"),
    Column("concurrency", "count"),
    Column("TTFT p50, ms", "one_decimal"),
    Column("TPOT p50, ms", "two_decimals"),
    Column("output tok/s", "one_decimal"),
    Column("requests", "count"),
)


def bench_section(bench: Sequence[BenchRow]) -> ReportSection:
    """The bench; where none was run it has no exhibits."""
    if not bench:
        return ReportSection("bench", "Bench")
    rows = tuple(
        (b.engine, b.concurrency, 1e3 * b.ttft_p50_s, 1e3 * b.tpot_p50_s, b.output_tok_s, b.num_requests) for b in bench
    )
    plots = (
        _curves(bench, "Throughput", "output tokens per second", "one_decimal", lambda row: row.output_tok_s),
        _curves(bench, "Time per output token", "TPOT p50, ms", "two_decimals", lambda row: 1e3 * row.tpot_p50_s),
        _curves(bench, "Time to first token", "TTFT p50, ms", "one_decimal", lambda row: 1e3 * row.ttft_p50_s),
    )
    return ReportSection("bench", "Bench", (Table("Bench", COLUMNS, rows), *plots, _traded(bench)))


def _names(bench: Sequence[BenchRow]) -> list[str]:
    """The candidate first: its colour is that of all that is about the candidate."""
    return sorted(dict.fromkeys(row.engine for row in bench), key=lambda name: (name != "candidate", name))


def _curves(
    bench: Sequence[BenchRow], name: str, y_name: str, form: Form, value: Callable[[BenchRow], float]
) -> Curves:
    curves = []
    for engine in _names(bench):
        rows = sorted((row for row in bench if row.engine == engine), key=lambda row: row.concurrency)
        curves.append(Curve(engine, tuple(Point(float(row.concurrency), value(row)) for row in rows)))
    return Curves(name, "requests at a time", y_name, tuple(curves), form, is_log_x=True)


def _traded(bench: Sequence[BenchRow]) -> Curves:
    curves = []
    for engine in _names(bench):
        rows = sorted((row for row in bench if row.engine == engine), key=lambda row: row.concurrency)
        points = tuple(Point(row.output_tok_s, 1e3 * row.tpot_p50_s, label=f"c{row.concurrency}") for row in rows)
        curves.append(Curve(engine, points))
    name, y_name = "Latency against throughput", "TPOT p50, ms"
    return Curves(name, "output tokens per second", y_name, tuple(curves), "two_decimals")
