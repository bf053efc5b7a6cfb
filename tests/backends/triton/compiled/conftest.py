"""These tests compile kernels, so Triton's interpreter must not be on: they run in a process of their own."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.exit("tests/backends/triton/compiled: unset TRITON_INTERPRET; nothing is compiled under it", returncode=4)


@pytest.fixture(params=[80, 86, 89, 90, 100], ids=lambda arch: f"sm_{arch}")
def arch(request: pytest.FixtureRequest) -> int:
    """Each architecture that the launch table knows."""
    value: int = request.param
    return value
