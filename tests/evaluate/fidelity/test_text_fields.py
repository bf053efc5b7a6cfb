import pytest

from quantpipe.calibration.held_out.held_out_windows import SEVERAL
from quantpipe.errors import DataError
from quantpipe.evaluate.fidelity.text_fields import check_patterns, fields_of


def test_a_text_has_its_name_as_domain_and_what_patterns_say_the_later_ones_first() -> None:
    patterns = {"letters_*": {"domain": "letters", "language": "de"}, "*_b": {"language": "fr"}}
    assert fields_of(("letters_a", "letters_b", "mail", SEVERAL), patterns) == (
        {"domain": "letters", "language": "de"},
        {"domain": "letters", "language": "fr"},
        {"domain": "mail"},
        {},
    )


def test_a_pattern_that_fits_no_name_is_refused_with_the_nearest() -> None:
    check_patterns({"m*": {}}, ["mail"])
    with pytest.raises(DataError, match=r"slices: no text is called 'mall'; did you mean 'mail'\?"):
        check_patterns({"mall": {}}, ["mail"])
