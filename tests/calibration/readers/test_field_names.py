"""Names of fields that are safe to show, and rows of data in their place that are not."""

import pytest

from quantpipe.calibration.readers.field_names import shown_names, there_are

NO_HEADER = (
    "there are: {} columns (the file may lack its header); correct the name in the set, or "
    "name the columns of a file without header in order: columns: [...]"
)


@pytest.mark.parametrize(
    "row",
    [
        ["Maria Gonzalez", "Berlin", "Diabetes", "0"],
        ["Maria Gonzalez", "Berlin", "Diabetes"],
        ["Berlin", "Diabetes"],
        ["张伟", "北京", "糖尿病"],
        ["text", "0"],
        ["I am still waiting on my card?", "card_arrival"],
        ["card_arrival", "3.50"],
        ["anna", "13800138000"],
        ["anna@example.com", "x"],
        ["2024-01-02", "text"],
        ["text", "x" * 41],
        ["question", "Where is it"],
        ["alice", "berlin", "diabetes"],
        ["alice.meier", "berlin_mitte"],
        ["question", "alice", "diabetes"],
    ],
)
def test_a_row_of_data_in_the_place_of_names_is_only_counted(row: list[str]) -> None:
    assert there_are("column", "answers", row, is_first_row=True) == NO_HEADER.format(len(row))


def test_a_name_that_is_near_is_offered_even_among_hidden_ones() -> None:
    assert there_are("column", "text", ["Text", "Unit price (USD)"], is_first_row=True) == (
        "there are: 2 columns (the file may lack its header); did you mean 'Text'?"
    )
    assert "mean" not in there_are("column", "diabetic", ["Diabetes", "0"], is_first_row=True)


@pytest.mark.parametrize(
    "names",
    [
        ["a", "b"],
        ["createdAt", "user_id", "meta.x"],
        ["Question", "Best Answer"],
        ["Kunde", "customer_id"],
        ["客户", "内容"],
    ],
)
def test_names_are_shown(names: list[str]) -> None:
    assert shown_names("column", names) == ", ".join(names)


@pytest.mark.parametrize("names", [["id", "Prompt", "kunde"], ["user_id", "order_id", "x"], ["内容", "标题", "客户"]])
def test_a_first_row_with_two_words_that_headers_have_is_shown(names: list[str]) -> None:
    assert shown_names("column", names, is_first_row=True) == ", ".join(names)


def test_names_beside_one_that_the_set_uses_are_names() -> None:
    hidden = "2 columns (the file may lack its header)"
    assert shown_names("column", ["Frage", "Antwort"], is_first_row=True) == hidden
    assert shown_names("column", ["Frage", "Antwort"], known=["Frage"], is_first_row=True) == "Frage, Antwort"
    assert shown_names("column", ["Frage", "Antwort"]) == "2 columns (names that may be data are not shown)"


def test_keys_of_objects_that_may_be_data_are_only_counted() -> None:
    assert shown_names("field", ["Maria Gonzalez"]) == "1 field (names that may be data are not shown)"


def test_only_so_many_names_are_shown() -> None:
    assert shown_names("column", []) == "none"
    assert shown_names("column", ["id", ""]) == "id, (without a name)"
    assert shown_names("column", [f"c{i}" for i in range(23)]).endswith("c19, ... 3 more")
