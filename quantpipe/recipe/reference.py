"""What recipes may hold, and what one holds, for people and editors: JSON schema, key reference, summary."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantpipe.gate.metrics import METRICS, Metric
from quantpipe.recipe.schema import Recipe

Schema = Mapping[str, Any]

_INTRODUCTION = """\
# Recipes: the key reference

One YAML file describes one release candidate: the model, how it is quantized, how it is judged. Made from the schema by
`quantpipe schema --markdown > recipes/README.md`; do not edit it by hand.

    quantpipe check recipes/quickstart.yaml                     # all mistakes at once, nothing is loaded
    quantpipe check recipes/quickstart.yaml --set bench.repeats=5
    quantpipe schema > recipe.schema.json                       # for completion in an editor

Unknown keys are errors. Relative paths start at the recipe file, those in `--set` too. `--set key.path=value` replaces
or adds one value, which is read as YAML.
"""


def recipe_schema() -> dict[str, Any]:
    """JSON schema of a recipe file, shorthands included."""
    schema = Recipe.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def key_reference() -> str:
    """Every key with its type, default and meaning, and every metric a gate may limit, as Markdown."""
    parts = [_INTRODUCTION, *key_tables(recipe_schema(), "The recipe")]
    parts.append(
        "## Metrics for `gate`\n\nBench metrics are measured at each concurrency `<c>` of `bench.concurrency`.\n"
    )
    parts.append(_table(("metric", "limit", "unit", "meaning"), [_metric_row(*item) for item in METRICS.items()]))
    return "\n".join(parts)


def key_tables(schema: Schema, top: str) -> Iterator[str]:
    """Heading, meaning and table of keys for each mapping in a schema, the outermost called ``top``."""
    for heading, section in _sections(schema, schema, "", set()):
        yield f"## {heading or top}\n\n{_text(section)}\n"
        rows = [_row(schema, section, name, key) for name, key in section["properties"].items()]
        yield _table(("key", "value", "default", "meaning"), rows)


def summary(recipe: Recipe) -> str:
    """A legal recipe in a few lines."""
    lines = [f"{recipe.name}: legal", f"  model     {recipe.model.source}"]
    if recipe.quantize is not None:
        scheme = " ".join(str(value) for value in recipe.quantize.scheme.model_dump(exclude={"symmetric"}).values())
        transforms = [transform.name for transform in recipe.quantize.transforms]
        method = " + ".join([*transforms, recipe.quantize.solver.name])
        lines.append(f"  quantize  {method} to {scheme}, kv_cache {recipe.quantize.kv_cache}")
    if recipe.calibration is not None:
        shape = f"{recipe.calibration.num_sequences} x {recipe.calibration.sequence_length} tokens"
        of = recipe.calibration.set if isinstance(recipe.calibration.set, Path) else recipe.calibration.set_name
        lines.append(f"  calibrate {shape} of {of}")
    if recipe.evaluate is not None:
        lines.append(f"  evaluate  {recipe.evaluate.suite}" + (", divergence" if recipe.evaluate.divergence else ""))
    if recipe.bench is not None:
        lines.append(f"  bench     concurrency {', '.join(map(str, recipe.bench.concurrency))}")
    limits = ", ".join(f"{entry.label} {entry.limit}" for entry in recipe.limits)
    lines.append(f"  gate      {limits or 'none: for quantpipe quantize only'}")
    lines.append(f"  output    {recipe.output}")
    return "\n".join(lines)


def write_key_reference(path: Path) -> None:
    """Write ``key_reference()`` to ``path``, normally ``recipes/README.md``."""
    path.write_text(key_reference(), encoding="utf-8")


def _sections(root: Schema, section: Schema, heading: str, seen: set[str]) -> Iterator[tuple[str, Schema]]:
    """A section and those inside it, depth first and each once, with its key path (and its name among several)."""
    yield heading, section
    for name, key in section["properties"].items():
        inner = [choice for choice in _inner_sections(root, key) if choice["title"] not in seen]
        seen |= {choice["title"] for choice in inner}
        outer = heading.split("`")[1] if heading else ""
        path = f"{outer}.{name}".removeprefix(".") + ("[]" if key.get("type") == "array" else "")
        for choice in inner:
            label = f" with {_tag(choice)}" if len(inner) > 1 else ""
            yield from _sections(root, choice, f"`{path}`{label}", seen)


def _tag(section: Schema) -> str:
    """The key and value that tell one of several mappings from the others."""
    values = {name: section["properties"].get(name, {}).get("const") for name in ("name", "kind")}
    return next(f"`{name}: {value}`" for name, value in values.items() if value is not None)


def _inner_sections(root: Schema, key: Schema) -> list[Schema]:
    """The mappings that a key may hold, references followed; `gate` and plain values have none."""
    if "$ref" in key:
        return [root["$defs"][key["$ref"].rpartition("/")[2]]]
    choices = [*key.get("anyOf", ()), *key.get("oneOf", ()), *([key["items"]] if "items" in key else ())]
    return [section for choice in choices for section in _inner_sections(root, choice)]


def _row(root: Schema, section: Schema, name: str, key: Schema) -> tuple[str, ...]:
    is_required = name in section.get("required", ())
    default = "required" if is_required else _default(key.get("default"))
    return f"`{name}`", _value(root, key), default, _text(key)


def _default(value: Any) -> str:
    if value is None or value == {}:
        return "absent"
    if value == "":
        return "empty"
    return "see below" if isinstance(value, dict) else f"`{json.dumps(value)}`".replace('"', "")


def _value(root: Schema, key: Schema) -> str:
    """What may be written for a key, in words."""
    choices = [choice for choice in (*key.get("anyOf", ()), *key.get("oneOf", ())) if choice.get("type") != "null"]
    if choices:
        return " or ".join(dict.fromkeys(_value(root, choice) for choice in choices))
    if "$ref" in key:
        return "mapping"
    if "const" in key:
        return f"`{key['const']}`"
    if "enum" in key:
        return ", ".join(f"`{choice}`" for choice in key["enum"])
    if key.get("type") == "array":
        return f"list of {_value(root, key['items'])}"
    if key.get("format") == "path":
        return "path"
    return {"object": "mapping", "boolean": "`true`, `false`", "string": "text"}.get(key["type"], _number(key))


def _number(key: Schema) -> str:
    bounds = {
        "minimum": "{} or more",
        "exclusiveMinimum": "more than {}",
        "maximum": "{} or less",
        "exclusiveMaximum": "less than {}",
    }
    words = [text.format(key[name]) for name, text in bounds.items() if name in key and abs(key[name]) < 1 << 62]
    return " ".join([key["type"], *([", ".join(words)] if words else [])])


def _metric_row(name: str, metric: Metric) -> tuple[str, ...]:
    limit = "`max`" if metric.better == "lower" else "`min`"
    return f"`{name}_c<c>`" if metric.per_concurrency else f"`{name}`", limit, metric.unit, metric.text


def _text(schema: Schema) -> str:
    return " ".join(str(schema.get("description", "")).split())


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
