"""`quantpipe gate --self-test` without a recipe, as a user runs it: needs no model, no data and no network."""

import re

import pytest

from quantpipe import cli
from quantpipe.controls import CONTROLS
from quantpipe.controls.tiny_model import KINDS
from quantpipe.errors import EXIT_PASS


def test_the_gate_refuses_every_damaged_copy_of_every_kind_and_passes_what_is_sound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, shown = cli.run(["gate", "--self-test", "--quiet"]), capsys.readouterr().out
    assert code == EXIT_PASS, shown
    lines = shown.splitlines()
    assert "  PASS    base model against itself: KL 0, 0 items flipped" in lines
    assert [line for line in lines if line in KINDS] == list(KINDS)
    assert sum(line.startswith("  PASS    as it is") for line in lines) == len(KINDS)
    caught = re.findall(r"^  FAIL    (.+?): ", shown, flags=re.MULTILINE)
    assert set(caught) == set(CONTROLS)
    assert shown.count("chat template: 3 of 3 conversations") >= len(KINDS)
    assert lines[-1] == f"all {len(caught) + len(KINDS) + 1} controls behave"
