"""What a machine has, as far as it can be made to lack something."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from quantpipe.doctor import facts
from quantpipe.doctor.facts import Fact, machine_facts


def facts_with(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> dict[str, Fact]:
    """By subject, where these packages have these versions; None is not installed."""
    known = facts.version

    def version(name: str) -> str:
        found = versions[name] if name in versions else known(name)
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(facts, "version", version)
    return {fact.subject: fact for fact in machine_facts()}


def test_a_missing_or_old_library_of_the_runtime_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    found = facts_with(monkeypatch, numpy=None, torch="2.8.1+cu128", tokenizers="0.22.0")
    assert found["numpy"] == Fact("numpy", "not installed; 2.0 or later is needed for everything", "fault")
    assert found["torch"] == Fact("torch", "2.8.1+cu128; 2.9 or later is needed for everything", "fault")
    assert found["tokenizers"] == Fact("tokenizers", "0.22.0")


def test_a_missing_or_old_optional_library_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    found = facts_with(monkeypatch, triton="3.5.1", transformers=None)
    assert found["triton"] == Fact("triton", "3.5.1; 3.6 or later is needed for engine.backend 'triton'", "note")
    assert found["transformers"].state == "note"
    assert found["transformers"].found.endswith("is needed for quantizing and evaluating")


def test_kernels_that_are_not_compiled_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUANTPIPE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = {fact.subject: fact for fact in machine_facts()}["cpu kernels"]
    assert found.state == "note"
    assert found.found.startswith(
        "not compiled, and backend 'cpu' runs on torch's operators: $CXX is 'no-such-compiler'"
    )
    monkeypatch.setenv("CXX", "sh")
    found = {fact.subject: fact for fact in machine_facts()}["cpu kernels"]
    assert (found.state, found.found.startswith("not compiled yet; ")) == ("ok", True)
