"""Samples from the running Python: sorted, excluded by name, cut at blank lines."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantpipe.calibration.definition.sources import PythonStdlibSource
from quantpipe.calibration.samples.python_stdlib import evenly_spaced, read_python_stdlib, split_at_blank_lines


def read(content: Any, **settings: Any) -> dict[str, str]:
    source = PythonStdlibSource(kind="python_stdlib", content=content, **settings)
    return {sample.where: str(sample.content) for sample in read_python_stdlib(source)}


def test_modules_hold_source_of_packages_and_their_parts() -> None:
    samples = read("modules", chunks_per_name=1, exclude=("test", "encodings"))
    names = [where.partition("[")[0] for where in samples]
    assert {"argparse", "json", "json.decoder", "asyncio.tasks"} <= set(names)
    assert names == sorted(names)
    assert not [name for name in names if name == "test" or name.startswith(("test.", "encodings"))]
    assert "json.tool" in names


def test_excluding_a_name_leaves_others_that_begin_like_it() -> None:
    names = {where.partition("[")[0] for where in read("modules", chunks_per_name=1, exclude=("json", "test", "io"))}
    assert not {"json", "json.decoder", "io"} & names
    assert "ipaddress" in names


def test_topics_are_the_reference_manual() -> None:
    samples = read("topics", chunks_per_name=1)
    assert any(where.startswith("pydoc_data.topics:lambda[") for where in samples)
    assert not any("lambda" in where for where in read("topics", exclude=("lambda", "lambdas")))


def test_two_readings_are_equal() -> None:
    assert list(read("topics").items()) == list(read("topics").items())


@given(text=st.text(alphabet="ab \n", max_size=400), chunk_chars=st.integers(100, 200))
def test_cutting_keeps_all_paragraphs_in_order(text: str, chunk_chars: int) -> None:
    pieces = list(split_at_blank_lines(text, chunk_chars))
    assert "".join(pieces).split() == text.split()
    assert all(piece.strip() for piece in pieces)
    assert all(len(piece) <= chunk_chars or "\n\n" not in piece.strip("\n") for piece in pieces)


@pytest.mark.parametrize(("num_all", "num_wanted", "expected"), [(0, 4, []), (3, 4, [0, 1, 2]), (10, 2, [2, 7])])
def test_chunks_are_spread_over_a_module(num_all: int, num_wanted: int, expected: list[int]) -> None:
    assert evenly_spaced(num_all, num_wanted) == expected
