"""A model card for the Hugging Face hub: front matter, and the numbers of the report that a user of the model needs."""

import math
import re
from collections.abc import Iterator

import yaml

from quantpipe.gate.report import inline
from quantpipe.reporting.contents import checks_table, sections_of
from quantpipe.reporting.exhibits import Facts
from quantpipe.reporting.markdown import section_markdown, table_markdown
from quantpipe.reporting.report import Report

SHOWN = ("quantization", "suite", "divergence", "memory", "bench", "environment", "provenance", "reproduce")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?=$|@)")


def render_model_card(report: Report) -> str:
    """The card. It names no licence: that is the base model's, which nobody here has read."""
    return "\n\n".join(part for part in _parts(report) if part) + "\n"


def _parts(report: Report) -> Iterator[str]:
    context, scheme = report.context, _fact(report, "scheme")
    yield f"---\n{yaml.safe_dump(_front_matter(report, scheme), sort_keys=False, allow_unicode=True)}---"
    yield f"# {inline(context.recipe_name)}"
    what = f"quantized to {scheme}" if scheme else "as it is, not quantized"
    yield (
        f"{inline(context.base_origin)}, {what}. An ordinary model folder in compressed-tensors format, judged by "
        f"quantpipe on {context.date[:10]} beside the model it was made from."
    )
    yield f"**{report.title}**: {report.summary}"
    yield "\n".join(f"- {note}" for note in report.notes)
    yield "## What it was held to"
    yield table_markdown(checks_table(report), right={2, 3, 5})
    by_id = {section.id: section for section in sections_of(report)}
    for name in SHOWN:
        if by_id[name].exhibits:
            yield from section_markdown(by_id[name])
    yield "## Licence"
    yield "That of the base model, and of the texts it was calibrated on. Fill this in before you publish."


def _front_matter(report: Report, scheme: str) -> dict[str, object]:
    context, hub_id = report.context, HUB_ID.match(report.context.base_origin)
    front: dict[str, object] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if hub_id is not None:
        front |= {"base_model": hub_id[0], "base_model_relation": "quantized"}
    labels = [part.partition(":")[0].strip().split()[0] for part in scheme.split(",") if part.strip()]
    front["tags"] = ["quantpipe", *(["compressed-tensors", *dict.fromkeys(labels)] if scheme else [])]
    metrics = [
        {"type": check.metric, "name": check.meaning or check.metric, "value": check.measurement.value}
        for check in report.checks
        if check.measurement is not None and math.isfinite(check.measurement.value)
    ]
    evaluated = {
        "task": {"type": "text-generation"},
        "dataset": {"type": "custom", "name": report.data.get("suite", "the recipe's own questions")},
        "metrics": metrics,
    }
    front["model-index"] = [{"name": context.recipe_name, "results": [evaluated]}]
    return front


def _fact(report: Report, name: str) -> str:
    for section in report.sections:
        for exhibit in section.exhibits:
            if section.id == "quantization" and isinstance(exhibit, Facts):
                return dict(exhibit.facts).get(name, "")
    return ""
