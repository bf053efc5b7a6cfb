"""The small model of the self-test and its artifacts, written once."""

from pathlib import Path

import pytest

from quantpipe.controls.tiny_model import KINDS, write_base, write_kind


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("tiny") / "base")


@pytest.fixture(scope="session")
def tiny_artifacts(tiny_base: Path) -> dict[str, Path]:
    return {name: write_kind(kind, tiny_base, tiny_base.parent / name) for name, kind in KINDS.items()}
