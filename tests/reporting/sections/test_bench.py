"""Curves over concurrency for both engines, each in its own unit."""

from reports import bench_rows

from quantpipe.reporting.exhibits import Curves
from quantpipe.reporting.sections.bench import bench_section


def test_each_engine_has_a_line_over_concurrency() -> None:
    plots = {each.name: each for each in bench_section(bench_rows()).exhibits if isinstance(each, Curves)}
    candidate, baseline = plots["Time per output token"].curves
    assert (candidate.name, baseline.name) == ("candidate", "baseline")
    assert [(point.x, round(point.y, 9)) for point in candidate.points] == [(1.0, 3.12), (8.0, 5.2)]
    assert [point.y for point in plots["Throughput"].curves[1].points] == [221.5, 821.5]
    assert [point.label for point in plots["Latency against throughput"].curves[0].points] == ["c1", "c8"]


def test_no_bench_is_no_exhibit() -> None:
    assert bench_section(()).exhibits == ()
