"""The compiled library, in each instruction set of this CPU."""

from collections.abc import Iterator

import pytest

from quantpipe.backends.cpu.native.build import BuildError, find_compiler
from quantpipe.backends.cpu.native.instruction_sets import EMULATED, ISA_FLAGS, runnable
from quantpipe.backends.cpu.native.library import Library, NativeError, load_library


@pytest.fixture(scope="module")
def library() -> Library:
    """Only a missing compiler is a reason to skip: sources that do not compile, or fail their check, are a fault."""
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    return load_library()


@pytest.fixture(scope="module", params=ISA_FLAGS)
def instruction_set(request: pytest.FixtureRequest, library: Library) -> Iterator[str]:
    """Only what this CPU lacks is skipped: a set that it has and that fails its check when loaded is a fault."""
    if request.param not in (*runnable(), EMULATED):
        pytest.skip(f"this CPU lacks {request.param}")
    before = library.call("qp_isa_name")
    try:
        library.check("qp_isa_select", request.param.encode())
    except NativeError as error:
        if "this CPU lacks it" not in str(error):  # a CPU that does not say beforehand
            raise
        pytest.skip(str(error))
    yield request.param
    library.check("qp_isa_select", before)
