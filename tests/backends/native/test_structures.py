"""What Python passes to the kernels has the fields that the C header declares."""

import re
from ctypes import Structure

import pytest

from quantpipe.backends.cpu.native import structures
from quantpipe.backends.cpu.native.build import SOURCES
from quantpipe.backends.cpu.native.library import SIGNATURES

HEADERS = "".join(path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.h")))
CODE = re.sub(r"//[^\n]*", "", HEADERS)


@pytest.mark.parametrize(
    ("name", "structure"),
    [
        ("qp_norm", structures.Norm),
        ("qp_shape", structures.Shape),
        ("qp_layer", structures.Layer),
        ("qp_batch", structures.Batch),
        ("qp_kv", structures.KV),
    ],
)
def test_structure_has_the_fields_of_the_header_in_order(name: str, structure: type[Structure]) -> None:
    found = re.search(rf"typedef struct {name} {{(.*?)}} {name};", CODE, re.DOTALL)
    assert found is not None
    declared = [re.fullmatch(r"(.*?)(\w+)", field.strip(), re.DOTALL) for field in found[1].split(";")[:-1]]
    expected = [(own[2], kind(own[1])) for own in declared if own is not None]
    assert [(field, ctype.__name__) for field, ctype in structure._fields_] == expected


def kind(declared: str) -> str:
    """The ctypes name of a C type."""
    if "* const*" in declared:
        return "LP_c_void_p"
    if "*" in declared:
        return "c_void_p"
    return {"int32_t": "c_int", "float": "c_float", "qp_norm": "Norm"}[declared.strip()]


def test_parts_that_are_timed_are_those_of_the_header() -> None:
    declared = re.search(r"enum {\s*QP_TIME_EMBEDDING.*?}", CODE, re.DOTALL)
    assert declared is not None
    assert tuple(name.lower() for name in re.findall(r"QP_TIME_(\w+)", declared[0])) == structures.TIMED_PARTS


@pytest.mark.parametrize("name", SIGNATURES)
def test_function_takes_as_many_arguments_as_the_header_says(name: str) -> None:
    declared = re.search(rf"\b{name}\(([^)]*)\)", CODE)
    assert declared is not None
    arguments = [own for own in declared[1].split(",") if own.strip() not in ("", "void")]
    assert len(SIGNATURES[name][1]) == len(arguments)
