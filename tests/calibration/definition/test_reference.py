"""The key reference of calibration sets: complete, and as committed."""

from pathlib import Path

from quantpipe.calibration.definition.mapping import Fields, Filter
from quantpipe.calibration.definition.reference import set_reference, set_schema
from quantpipe.calibration.definition.set_definition import Header
from quantpipe.calibration.definition.sources import KINDS
from quantpipe.calibration.redaction.section import RedactSection

COMMITTED = Path(__file__).parents[3] / "calibration" / "README.md"


def test_the_committed_key_reference_is_up_to_date() -> None:
    assert COMMITTED.read_text(encoding="utf-8") == set_reference(), (
        "run: quantpipe schema --calibration-set --markdown > calibration/README.md"
    )


def test_every_key_is_in_the_reference_with_a_meaning() -> None:
    rows = [line.split(" | ") for line in set_reference().splitlines() if line.startswith("| `")]
    named = {row[0].strip("|` ") for row in rows if row[-1].strip("| ")}
    for model in (Header, Fields, Filter, RedactSection, *KINDS.values()):
        assert set(model.model_fields) <= named


def test_the_schema_forbids_other_keys_in_every_source() -> None:
    schema = set_schema()
    for kind in KINDS.values():
        assert schema["$defs"][kind.__name__]["additionalProperties"] is False
