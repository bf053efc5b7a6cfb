"""The compiled library, in each instruction set of this CPU."""

from collections.abc import Iterator

import pytest

from quantpipe.backends.cpu.native.library import Library, NativeError, load_library

# The emulated set is plain arithmetic in the form of the widest vectors.
INSTRUCTION_SETS = ("scalar", "emulated", "avx2", "avxvnni", "avx512")


@pytest.fixture(scope="module")
def library() -> Library:
    try:
        return load_library()
    except NativeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest, library: Library) -> Iterator[str]:
    before = library.call("qp_isa_name")
    try:
        library.check("qp_isa_select", request.param.encode())
    except NativeError as error:
        pytest.skip(str(error))
    yield request.param
    library.check("qp_isa_select", before)
