"""The layers of ARCHITECTURE.md, read from the imports themselves."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "quantpipe"
ROWS: tuple[tuple[str, ...], ...] = (
    ("cache", "disk", "errors", "report", "wording"),
    ("formats", "gate", "recipe", "releases", "reporting"),
    ("models", "sources", "calibration"),
    ("backends",),
    ("quantize", "engine"),
    ("evaluate", "bench", "guided", "serve", "doctor", "plan"),
    ("evidence", "verdict"),
    ("calibrate", "candidate", "completion", "controls", "judgement", "llm", "pipeline"),
    (
        *("cli", "cli_arms", "cli_bench", "cli_calibrate", "cli_compare", "cli_front", "cli_gate", "cli_options"),
        *("cli_plan", "cli_rescore", "cli_traceback"),
    ),
)
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}
SIBLINGS_APART = {"quantize", "engine"}
RUNTIME = ("formats", "models", "backends", "engine")
RUNTIME_MAY_IMPORT = {"quantpipe", "torch", "numpy", "safetensors", "tokenizers", "triton"}
# On a machine with a GPU that has no more than these, the GPU check runs; transformers it compares with if it is there.
DOCTOR_MAY_IMPORT = {*RUNTIME_MAY_IMPORT, "click", "rich", "yaml", "transformers"}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_imports_only_from_its_own_row_or_below(path: Path) -> None:
    part = part_of(path)
    assert part in ROW_OF, f"{part} is in no layer: add it to ROWS here and in ARCHITECTURE.md"
    for name in imports(path):
        if not name.startswith("quantpipe."):
            continue
        other = name.split(".")[1]
        assert ROW_OF[other] <= ROW_OF[part], f"{part} imports {other}, which lies above it"
        if part != other:
            assert {part, other} != SIBLINGS_APART, f"{part} imports its sibling {other}"


@pytest.mark.parametrize("part", RUNTIME)
def test_runtime_needs_few_libraries(part: str) -> None:
    for path in (PACKAGE / part).rglob("*.py"):
        roots = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names)
        assert roots <= RUNTIME_MAY_IMPORT, f"{path.relative_to(PACKAGE)} imports {roots - RUNTIME_MAY_IMPORT}"


def test_doctor_needs_little_more_than_the_runtime() -> None:
    for path in (PACKAGE / "doctor").rglob("*.py"):
        found = list(imports(path))
        roots = {name.split(".")[0] for name in found} - set(sys.stdlib_module_names)
        assert roots <= DOCTOR_MAY_IMPORT, f"{path.relative_to(PACKAGE)} imports {roots - DOCTOR_MAY_IMPORT}"
        parts = {name.split(".")[1] for name in found if name.startswith("quantpipe.")}
        assert parts <= {*RUNTIME, "doctor", "errors", "cache"}, f"{path.relative_to(PACKAGE)} imports {parts}"
