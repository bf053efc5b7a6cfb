"""The compiled library, in each instruction set of this CPU."""

from collections.abc import Iterator

import pytest

from quantpipe.backends.cpu.native.build import BuildError, find_compiler
from quantpipe.backends.cpu.native.library import Library, NativeError, load_library

# The emulated set is plain arithmetic in the form of the widest vectors.
INSTRUCTION_SETS = ("scalar", "emulated", "avx2", "avxvnni", "avx512")


@pytest.fixture(scope="module")
def library() -> Library:
    """Only a missing compiler is a reason to skip: sources that do not compile, or fail their check, are a fault."""
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    return load_library()


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest, library: Library) -> Iterator[str]:
    before = library.call("qp_isa_name")
    try:
        library.check("qp_isa_select", request.param.encode())
    except NativeError as error:
        pytest.skip(str(error))
    yield request.param
    library.check("qp_isa_select", before)
