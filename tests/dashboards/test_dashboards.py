"""Dashboards ask only for what the server counts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantpipe.engine.stats import EngineStats
from quantpipe.serve.arms.metrics import RoutingMetrics
from quantpipe.serve.engine_metrics import EngineReader
from quantpipe.serve.exchange import Exchange
from quantpipe.serve.metrics import ServerMetrics
from quantpipe.serve.shadow.comparison import ChoiceComparison, ChoiceRecord
from quantpipe.serve.shadow.metrics import ShadowMetrics

FOLDER = Path(__file__).parents[2] / "dashboards"
DASHBOARD = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
NAME = re.compile(r"quantpipe:([a-z0-9_]+)")


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Labels by series, of a server that has counted everything once."""
    stats = EngineStats(1, 0, 1, 1, 2, 0, 0, 0, 0)
    engines = [EngineReader(label, lambda: stats, lambda: 0) for label in ("a", "b")]
    metrics = ServerMetrics(engines, lambda: (0, 0))
    exchange = Exchange("id", "POST", "/", "127.0.0.1")
    exchange.status, exchange.error = 503, "queue_full"
    metrics.count_exchange(exchange)
    metrics.requests[0].count_finished("stop", 1)
    RoutingMetrics(metrics.registry).count("a", "draw")
    shadow = ShadowMetrics(metrics.registry, ("a", "b"))
    shadow.count("compared")
    shadow.observe_times([[ChoiceRecord(["x"], 2, "stop", 0.1, 0.2)]] * 2)
    shadow.observe_texts([ChoiceComparison(False, ("stop", "length"), 3)])
    found: dict[str, set[str]] = {}
    for line in metrics.exposition().decode().splitlines():
        if not line.startswith("#"):
            labels = re.findall(r'(\w+)="', line)
            found.setdefault(NAME.match(line)[1], set()).update(labels)  # type: ignore[index]
    return found


def expressions() -> list[tuple[str, dict[str, Any]]]:
    return [(panel["title"], target) for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.mark.parametrize(("title", "target"), expressions(), ids=lambda part: part if isinstance(part, str) else "")
def test_expression_names_series_and_labels_that_exist(
    title: str, target: dict[str, Any], exposed: dict[str, set[str]]
) -> None:
    expression = target["expr"]
    names = NAME.findall(expression)
    assert names and set(names) <= exposed.keys(), title
    labels = {label for name in names for label in exposed[name]} | {"instance"}
    kept = {label for grouped in re.findall(r"by \(([\w, ]+)\)", expression) for label in grouped.split(", ")}
    filtered = set(re.findall(r'(\w+)=~"', expression))
    assert kept | filtered <= labels, f"{title}: no label {kept | filtered - labels}"
    for shown in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
        assert shown in kept, f"{title}: the legend has {shown}, which is summed away"
    own = {name for name in names if "arm" in exposed[name] and not name.startswith(("shadow", "routed"))}
    assert not own or 'arm=~"$arm"' in expression or "arm" in kept, f"{title}: nobody can choose an arm"
    assert ("rate(" in expression or "increase(" in expression) == any(
        name.endswith(("_total", "_bucket")) for name in names
    ), f"{title}: counters have rates, gauges have none"
    assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")


def test_every_panel_has_a_place_of_its_own_and_an_expression() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        assert panel["targets"], panel["title"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_variables_ask_for_series_that_exist(exposed: dict[str, set[str]]) -> None:
    queries = [variable["query"] for variable in DASHBOARD["templating"]["list"]]
    assert {name for query in queries for name in NAME.findall(query)} <= exposed.keys()


def test_choice_of_all_arms_includes_a_server_that_has_only_one() -> None:
    (arm,) = [variable for variable in DASHBOARD["templating"]["list"] if variable["name"] == "arm"]
    assert arm["includeAll"] and re.fullmatch(arm["allValue"], "")  # a label that is not there is an empty one


def test_scrape_configuration_renames_every_series_to_vllms() -> None:
    jobs = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    (rule,) = next(job for job in jobs if job["job_name"] == "quantpipe-as-vllm")["metric_relabel_configs"]
    assert rule["source_labels"] == [rule["target_label"]] == ["__name__"]
    renamed = re.fullmatch(rule["regex"], "quantpipe:num_requests_running")
    assert renamed is not None
    assert renamed.expand(rule["replacement"].replace("${1}", r"\1")) == "vllm:num_requests_running"
