"""These tests run kernels in Triton's interpreter, on before Triton is imported: they have a process of their own."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.exit("tests/backends/triton/interpreted: run these with TRITON_INTERPRET=1 (`make test` does)", returncode=4)

import interpreter_bfloat16

interpreter_bfloat16.repair()
