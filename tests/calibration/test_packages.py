"""The packages of ``quantpipe.calibration`` from low to high, read from the imports themselves: no circles."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "quantpipe" / "calibration"
LOW_TO_HIGH = (
    "text",
    "account",
    "rows",
    "redaction",
    "templates",
    "definition",
    "readers",
    "samples",
    "checks",
    "calibration_set",
    "sampling",
    "held_out",
    "stored",
    "build",
    "views",
)
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quantpipe.calibration."):
            yield (node.module or "").split(".")[2]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_its_own_package_or_a_lower_one(path: Path) -> None:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    above = [other for other in imported(path) if LOW_TO_HIGH.index(other) > LOW_TO_HIGH.index(part)]
    assert not above, f"{part} imports {above[0]}, which lies above it"
