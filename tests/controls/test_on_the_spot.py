from quantpipe.controls import CONTROLS
from quantpipe.controls.on_the_spot import self_test_on_the_spot
from quantpipe.controls.self_test import AS_IT_IS, summary
from quantpipe.controls.tiny_model import KINDS
from quantpipe.report import Reporter


def test_the_gate_refuses_every_damaged_copy_of_every_kind_and_passes_what_is_sound(quiet: Reporter) -> None:
    rows = self_test_on_the_spot(quiet)
    assert all(row.is_well for row in rows), summary(rows)
    assert rows[0].detail == "KL 0, 0 items flipped"
    assert [row.artifact for row in rows if row.control == AS_IT_IS] == list(KINDS)
    caught = {row.control for row in rows if row.outcome == "FAIL"}
    assert caught == set(CONTROLS)
    assert "chat template: 3 of 3 conversations" in next(r.detail for r in rows if r.control == "wrong chat template")
    assert summary(rows).endswith(f"all {sum(row.outcome != 'none' for row in rows)} controls behave")
