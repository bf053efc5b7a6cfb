"""A report in which every number is one of a kind: it can be looked for in any file that is rendered from it."""

import math
from dataclasses import replace
from typing import Any

from quantpipe.gate.judge import GateResult, Limit, Measurement, judge
from quantpipe.gate.record import RunContext
from quantpipe.gate.report import BenchRow, ParityRow, ScoreRow
from quantpipe.reporting.exhibits import Column, Curve, Curves, Point, Table
from quantpipe.reporting.report import Report, ReportSection, report_of
from quantpipe.reporting.sections.bench import bench_section
from quantpipe.reporting.sections.coverage import coverage_section
from quantpipe.reporting.sections.divergence import WindowKL, divergence_section
from quantpipe.reporting.sections.facts import parity_section, quantization_section
from quantpipe.reporting.sections.layers import layers_section
from quantpipe.reporting.sections.memory import MemoryRow, memory_section
from quantpipe.reporting.sections.suite import FlipRow, suite_section

CONTEXT = RunContext(
    recipe_name="legal | <v2>",
    recipe_digest="aa" * 32,
    artifact_digest="bb" * 32,
    base_digest="cc" * 32,
    base_origin="acme/legal-7b@main",
    engine={"backend": "cpu", "num_threads": None},
    versions={"quantpipe": "0.1.0", "torch": "2.13.0"},
    machine={"cpu": "Some CPU", "cores": 2, "system": "Linux 6.1.0-13-cloud"},
    date="2025-01-02T03:04:05+00:00",
)
MANIFEST: dict[str, Any] = {
    "kv_cache": "int8_per_token_head",
    "kv_errors": {"int8_per_token_head": {"mean_error": 0.000567, "worst_error": 0.00121, "worst_layer": 1}},
    "layers": [
        {
            "name": f"model.layers.{block}.{kind}",
            "scheme": "w8a8",
            "error_before": 2e-4 * (block + 1) + number * 1e-5,
            "error_after": 1e-4 * (block + 1) + number * 1e-5,
        }
        for block in range(3)
        for number, kind in enumerate(("self_attn.q_proj", "mlp.down_proj"))
    ],
}
COVERAGE: dict[str, Any] = {
    "schema": 1,
    "text": {
        "name": "support",
        "num_tokens": 4096,
        "domains": [{"name": "retail", "num_documents": 3, "num_tokens": 3011}],
        "languages": [{"name": "zh", "num_documents": 2, "num_tokens": 1085}],
        "lengths": [{"name": "65 to 128", "num_documents": 3, "num_tokens": 3011}],
        "num_documents": 3,
        "num_truncated": 1,
        "num_tokens_cut": 29,
        "vocabulary_size": 49152,
        "num_ids": 735,
        "vocabulary_frac": 0.015,
        "held_out": [{"name": "manual", "num_tokens": 512, "num_tokens_seen": 254, "num_ids": 99, "num_ids_seen": 50}],
    },
    "activations": None,
}


def a_result(kl: float = 0.0311) -> GateResult:
    """One check that passes, one that does not decide; figures of slices, and one without an interval."""
    measurements = [
        Measurement("mean_kl", kl, kl - 0.0033, kl + 0.0033, 0.9, 16, "nats"),
        Measurement("accuracy_loss_points", 4.01, 2.02, 6.03, 0.9, 181, "points"),
        Measurement("p99_kl", 0.4321, -math.inf, math.inf, 0.9, 4096, "nats", "worst | window"),
        Measurement("mean_kl[domain=code]", 0.0277, 0.0255, 0.0299, 0.9, 8, "nats"),
        Measurement("mean_kl[domain=legal]", 0.0377, 0.0355, 0.0399, 0.9, 8, "nats"),
    ]
    return judge({"mean_kl": Limit(max=0.05), "accuracy_loss_points": Limit(max=5.0)}, measurements)


def bench_rows(factor: float = 1.0) -> tuple[BenchRow, ...]:
    return (
        BenchRow("baseline", 1, 3, 0.0123, 0.00451, 221.5),
        BenchRow("candidate", 1, 3, 0.0101, 0.00312 * factor, 318.25 / factor),
        BenchRow("baseline", 8, 24, 0.0523, 0.0075, 821.5),
        BenchRow("candidate", 8, 24, 0.0401, 0.0052 * factor, 1219.75 / factor),
    )


def all_sections(factor: float = 1.0) -> tuple[ReportSection, ...]:
    """Every section that a run can have, and one that nobody here has heard of."""
    position = Curve("all", (Point(256.0, 0.0311, 0.02, 0.04), Point(4096.0, 0.0633)))
    judges = Table("Judges", (Column("judge"), Column("says", "figure")), (("j", 7.77),))
    return (
        suite_section(
            (ScoreRow("code", 41, 20, 19, 3, 2), ScoreRow("law", 140, 100, 97, 7, 4)),
            (FlipRow("t", "item-7", "code", True, True, "c7", {"language": "de"}), FlipRow("t", "x", "law", False)),
        ),
        divergence_section(
            (("perplexity", "baseline 12.345, candidate 12.567"),),
            (WindowKL("code", 0.0278, 0.91), WindowKL("legal", 0.0379, 0.77), WindowKL("code", 0.0271, 0.5)),
        ),
        ReportSection("divergence", "Divergence", (Curves("KL by position", "position", "mean KL", (position,)),)),
        layers_section(MANIFEST),
        coverage_section(COVERAGE),
        bench_section(bench_rows(factor)),
        memory_section(
            (
                MemoryRow("candidate", {"w8a8": 98_765_432, "BF16": 3_456_789}, "int8_static", 864, 10**8, 10**9),
                MemoryRow("baseline", {"BF16": 234_567_890}, "auto", 3072, 2 * 10**8, 10**9),
            )
        ),
        parity_section((ParityRow("reloaded == served", 2e-5, 1e-3), ParityRow("a == b", math.nan, 1e-3))),
        quantization_section((("scheme", "w8a8: 6"), ("solver", "rtn"))),
        ReportSection("judges", "Judges", (judges,)),
    )


def a_report(result: GateResult | None = None, factor: float = 1.0, **context: Any) -> Report:
    """A whole report; ``context`` are fields of its context that differ."""
    return report_of(
        result or a_result(),
        replace(CONTEXT, **context),
        ("the baseline is a dequantized GGUF",),
        all_sections(factor),
        {"suite": "dd" * 32, "held-out text": "ee" * 32, "bench": "ff" * 32},
        "version: 1\nname: legal  # <b>not bold</b>",
        ("quantpipe run recipes/legal.yaml",),
    )
