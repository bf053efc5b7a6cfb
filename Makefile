# Everything here works from a fresh clone: each target first makes the virtual environment it needs.
PYTHON ?= python3
VENV ?= .venv
PIP_INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST_ARGS ?= -n 2
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python -m pytest $(PYTEST_ARGS)

.PHONY: demo test test-package test-interpreted test-compiled test-sanitized gpu-check check lint format clean

demo: $(VENV)/.runtime-installed
	$(VENV)/bin/quantpipe run recipes/quickstart.yaml

# Triton either interprets kernels or compiles them, and what it does is fixed when it is imported. So its two suites run
# apart from each other and from the tests of everything else.
test:
	$(MAKE) test-package
	$(MAKE) test-interpreted
	$(MAKE) test-compiled

test-package: $(VENV)/.dev-installed
	env -u TRITON_INTERPRET $(PYTEST)

test-interpreted: $(VENV)/.dev-installed
	TRITON_INTERPRET=1 $(PYTEST) tests/backends/triton/interpreted

test-compiled: $(VENV)/.dev-installed
	env -u TRITON_INTERPRET $(PYTEST) tests/backends/triton/compiled

# The C++ kernels once more, compiled with the address and undefined-behaviour sanitizers. Not part of `test`: compiling
# them so takes longer than the tests.
test-sanitized: $(VENV)/.dev-installed
	QUANTPIPE_TEST_SANITIZERS=1 $(PYTEST) -n 0 tests/backends/native/test_sanitizers.py

# On a machine with a CUDA GPU: every kernel is checked and timed, in up to 8 minutes.
gpu-check: $(VENV)/.dev-installed
	$(VENV)/bin/quantpipe doctor --gpu-check

check: lint test

lint: $(VENV)/.dev-installed
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: $(VENV)/.dev-installed
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV) runs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime-installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP_INSTALL) -e .
	touch $@

$(VENV)/.dev-installed: $(VENV)/.runtime-installed
	$(PIP_INSTALL) -e '.[dev]'
	touch $@
