"""The costly steps, as a build shows them: which checks come first, and where refused rows end it."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from quantpipe.calibration import Budget, build_calibration
from quantpipe.errors import DataError

Make = Callable[..., Path]


def text_rows(num_rows: int, text: str = "a question about row {i} that says the same as others do") -> list[str]:
    return [json.dumps({"text": text.format(i=i)}) for i in range(num_rows)]


def test_a_template_that_refuses_every_row_ends_after_ten_in_the_order_of_the_file(
    make_set: Make, make_tokenizer: Make
) -> None:
    folder = make_set(text_rows(300, "secret {i}"), "fields: {text: text}\n    template: t.jinja")
    (folder / "t.jinja").write_text("\n{{ text.foo }}")
    with pytest.raises(DataError) as caught:
        build_calibration(folder, make_tokenizer(), Budget(4, 32))
    *lines, last = str(caught.value).splitlines()
    rows = [int(re.findall(r"rows\.jsonl:(\d+): ", line)[0]) for line in lines]
    assert len(rows) == 10 and rows == sorted(rows)
    assert all(f"refuses this sample: {folder}/t.jinja:2: text.foo: no such attribute" in line for line in lines)
    assert last == "... the other rows were not tried"
    assert "secret" not in str(caught.value)


def test_few_refused_rows_are_in_the_order_of_the_file(make_set: Make, make_tokenizer: Make) -> None:
    rows = text_rows(60)
    for i in (3, 17, 50):
        rows[i] = json.dumps({"text": f"a bad row {i}"})
    folder = make_set(rows, "fields: {text: text}\n    template: t.jinja")
    (folder / "t.jinja").write_text("{% if 'bad' in text %}{{ raise_exception('no such rows') }}{% endif %}{{ text }}")
    (folder / "set.yaml").write_text((folder / "set.yaml").read_text() + "near_duplicates: off\n")
    with pytest.raises(DataError) as caught:
        build_calibration(folder, make_tokenizer(), Budget(4, 32))
    assert re.findall(r"rows\.jsonl:(\d+): ", str(caught.value)) == ["4", "18", "51"]
    (folder / "set.yaml").write_text((folder / "set.yaml").read_text() + "bad_rows: drop\n")
    assert build_calibration(folder, make_tokenizer(), Budget(4, 32)).account[0].dropped["refused by the template"] == 3


@pytest.mark.parametrize("allow_shortfall", [False, True])
@pytest.mark.parametrize("num_rows", [5, 3000])
def test_a_template_that_refuses_every_row_is_an_error_even_where_such_rows_are_dropped(
    make_set: Make, make_tokenizer: Make, num_rows: int, allow_shortfall: bool
) -> None:
    folder = make_set(text_rows(num_rows, "secret {i}"), "fields: {text: text}\n    template: t.jinja")
    (folder / "t.jinja").write_text("{{ text[:0] }}\n{{ raise_exception('roles must alternate') }}")
    with (folder / "set.yaml").open("a") as file:
        file.write("bad_rows: drop\nnear_duplicates: off\n")
    with pytest.raises(DataError) as caught:
        build_calibration(folder, make_tokenizer(), Budget(4, 32), allow_shortfall=allow_shortfall)
    tried = "5" if num_rows == 5 else "1,000"
    assert re.fullmatch(
        rf"\S+/set.yaml:5:11: sources\[0\]: rows.jsonl: no row survived the template \({tried} rows tried\); "
        r"\S+/rows.jsonl:\d+: the template refuses this sample: \S+/t.jinja:2: roles must alternate",
        str(caught.value),
    )


@pytest.mark.parametrize("template", [None, "{{ text }}"])
def test_truncating_a_set_of_short_rows_compares_and_redacts_none(
    make_set: Make, make_tokenizer: Make, template: str | None
) -> None:
    text = "row {i}: mail me at somebody@example.com about the same thing as everybody else"
    folder = make_set(text_rows(50, text), "fields: {text: text}" + ("\n    template: t.jinja" if template else ""))
    (folder / "t.jinja").write_text(template or "")
    (folder / "set.yaml").write_text((folder / "set.yaml").read_text() + "packing: truncate\n")
    with pytest.raises(DataError, match=r"no row is left to use after dropping rows: 50 shorter than a sequence; add"):
        build_calibration(folder, make_tokenizer(), Budget(4, 200))
    with (folder / "rows.jsonl").open("a") as file:
        file.writelines(json.dumps({"text": f"{i} " * 150}) + "\n" for i in range(10, 14))
    [account] = build_calibration(folder, make_tokenizer(), Budget(4, 200)).account
    assert account.dropped == {"shorter than a sequence": 50}
    assert account.redacted == {}


def test_a_row_that_redaction_makes_too_short_is_not_used(make_set: Make, make_tokenizer: Make) -> None:
    mails = " ".join(f"a.rather.long.name.of.somebody.{i}@mail.example.com" for i in range(6))
    folder = make_set([json.dumps({"text": f"{i} {mails}"}) for i in range(3)])
    (folder / "set.yaml").write_text((folder / "set.yaml").read_text() + "packing: truncate\nnear_duplicates: off\n")
    with pytest.raises(DataError, match="no row is left to use after dropping rows: 3 shorter than a sequence"):
        build_calibration(folder, make_tokenizer(), Budget(2, 250))
