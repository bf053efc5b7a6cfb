"""Results as Markdown rows."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

HEAD = (
    "| model | row | tool | mean KL | p99 KL | top-1 | ppl ratio | weights, MB | wall, s | CPU, s | peak, GB |\n"
    "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def read_results(file: Path) -> list[dict[str, Any]]:
    """Every record, in the order they were made."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def latest(records: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Per model and row, the records of its last run, all rounds of it; in the order of first appearance."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        key = (record["model"], record["row"])
        if record["round"] == 0:
            groups.setdefault(key, []).clear()
        groups.setdefault(key, []).append(record)
    return list(groups.values())


def markdown_row(records: list[Mapping[str, Any]]) -> str:
    """One row: figures from the round that was judged, the median of time and memory over rounds."""
    first = records[0]
    start = f"| {first['model']} | {first['row']} | {first['tool']} |"
    failed = next((record["error"] for record in records if "error" in record), None)
    if failed is not None:
        return f"{start} failed: {' '.join(failed.split())[-160:]} |"
    judged: Mapping[str, Any] = next((record for record in records if "mean_kl" in record), {})
    figures = " | ".join(
        f"{judged[name]:.{digits}{kind}}" if name in judged else ""
        for name, digits, kind in (
            ("mean_kl", 3, "g"),
            ("p99_kl", 3, "g"),
            ("top1_agreement", 3, "f"),
            ("perplexity_ratio", 3, "f"),
        )
    )
    wall_s, cpu_s, peak_gb = (median(r["cost"][name] for r in records) for name in ("wall_s", "cpu_s", "peak_gb"))
    return f"{start} {figures} | {first['weights_mb']:.0f} | {wall_s:.0f} | {cpu_s:.0f} | {peak_gb:.2f} |"
