import json
import math
from dataclasses import replace

import numpy as np
import pytest
from read_windows import window, windows

from quantpipe.evaluate.fidelity.windows import select, unknown_fields, window_of, window_record

FIELDS = [{"domain": "law", "language": "de"}, {"domain": "code"}, {}]


def test_a_window_is_read_back_to_the_last_bit() -> None:
    kl_T = np.array([0.1, 1 / 3, math.inf, 5e-324])
    made = replace(window(replace(windows(1)[0].row, num_positions=4), FIELDS[0]), kl_T=kl_T)
    read = window_of(json.loads(json.dumps(window_record(made))))
    assert (read.row, read.fields) == (made.row, made.fields)
    assert read.kl_T.tobytes() == kl_T.tobytes()


def test_a_window_that_lacks_positions_is_refused() -> None:
    record = window_record(windows(1)[0])
    with pytest.raises(ValueError, match="100 of the 101 positions of a window"):
        window_of(record | {"num_positions": 101})
    with pytest.raises(ValueError, match="base64"):
        window_of(record | {"kl_f64": "*"})


def test_windows_are_chosen_by_all_fields_that_are_asked_for() -> None:
    read = [window(windows(1)[0].row, fields) for fields in FIELDS]
    assert select(read, {}) == read
    assert select(read, {"domain": "law", "language": "de"}) == read[:1]
    assert select(read, {"domain": "code", "language": "de"}) == []


def test_fields_that_nobody_has_are_named_with_those_that_are_known() -> None:
    assert unknown_fields(FIELDS, {"domain": "code"}) is None
    assert unknown_fields(FIELDS, {"domain": "mail"}) == "no window has domain 'mail' (its values: code, law)"
    assert unknown_fields(FIELDS, {"year": "1"}) == "no window has year '1' (known fields: domain, language)"
    text = "no window has domain 'code' and language 'de' together"
    assert unknown_fields(FIELDS, {"domain": "code", "language": "de"}) == text
