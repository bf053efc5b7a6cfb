"""Compiling and caching, on a library of two small units: what the kernels' own sources hold does not matter here."""

import ctypes
import os
import shutil
from pathlib import Path

import pytest

from quantpipe.backends.cpu.native import build
from quantpipe.backends.cpu.native.build import BuildError, compile_library, find_compiler, library_name, library_path
from quantpipe.backends.cpu.native.instruction_sets import runnable

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in build.COMPILERS), reason="no C++ compiler on this machine"
)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library whose function tells which instruction sets its units were compiled for."""
    folder = tmp_path / "src"
    folder.mkdir()
    monkeypatch.delenv("QUANTPIPE_EMULATED_ISA", raising=False)
    names = list(build.ISA_FLAGS)
    for name in names:
        (folder / f"isa_{name}.cpp").write_text(
            f"#ifdef QP_ISA_ABSENT\nint has_{name}() {{ return 0; }}\n#else\nint has_{name}() {{ return 1; }}\n#endif\n"
        )
    declared = "".join(f"int has_{name}();\n" for name in names)
    total = " + ".join(f"has_{name}()" for name in names)
    (folder / "api.cpp").write_text(f'{declared}extern "C" int num_isas() {{ return {total}; }}\n')
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("QUANTPIPE_CACHE", str(tmp_path / "cache"))
    return folder


def test_library_is_compiled_once_and_then_found(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = library_path()
    assert path.parent == Path(os.environ["QUANTPIPE_CACHE"]) / "native"
    num_isas = ctypes.CDLL(str(path)).num_isas()
    assert num_isas == len(runnable())
    monkeypatch.setenv("PATH", "")  # no compiler any more
    assert library_path() == path


def test_name_follows_the_sources(sources: Path) -> None:
    before = library_name()
    assert library_name() == before
    (sources / "api.cpp").write_text((sources / "api.cpp").read_text() + "// more\n")
    assert library_name() != before


def test_emulated_set_is_compiled_where_it_is_asked_for(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = library_path()
    monkeypatch.setenv("QUANTPIPE_EMULATED_ISA", "1")
    path = library_path()
    assert path != plain
    assert ctypes.CDLL(str(path)).num_isas() == len(runnable()) + 1


def test_shipped_library_comes_before_the_cache(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = build.PREBUILT / library_name()
    shipped.parent.mkdir()
    shipped.write_bytes(b"")
    assert library_path() == shipped


def test_no_compiler_is_said_in_one_line(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler was found; install one"):
        library_path()


def test_named_compiler_that_is_none_is_said(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="CXX is 'no-such-compiler'"):
        find_compiler()


def test_fault_in_a_source_is_quoted_and_nothing_is_left(sources: Path) -> None:
    (sources / "api.cpp").write_text("this is no C++\n")
    with pytest.raises(BuildError, match=r"api\.cpp.*error") as caught:
        library_path()
    assert "\n" not in str(caught.value)
    assert list((Path(os.environ["QUANTPIPE_CACHE"]) / "native").iterdir()) == []


def test_folder_that_cannot_be_written_is_said(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUANTPIPE_CACHE", str(tmp_path / "file"))  # a folder cannot be made below a file
    with pytest.raises(BuildError, match="set QUANTPIPE_CACHE to a writable folder"):
        library_path()


def test_unit_of_an_unknown_instruction_set_offers_nothing(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "ISA_FLAGS", {**build.ISA_FLAGS, "avx512": ("-mno-such-thing",)})
    path = compile_library(build.PREBUILT / "library.so")
    assert ctypes.CDLL(str(path)).num_isas() < len(build.INSTRUCTION_SETS)


def test_extra_flags_reach_the_compiler(sources: Path, tmp_path: Path) -> None:
    (sources / "api.cpp").write_text('extern "C" int answer() { return ANSWER; }\n')
    path = compile_library(tmp_path / "extra.so", ("-DANSWER=42",))
    assert ctypes.CDLL(str(path)).answer() == 42
