"""Rows of CSV files: quoting, numbering, columns, and the one line each bad row gets."""

from pathlib import Path

import pytest
from calibration.reading import Reading

from quantpipe.calibration.readers.files import MAX_ROW_BYTES
from quantpipe.errors import DataError


def test_a_row_is_numbered_by_the_line_where_it_starts(tmp_path: Path) -> None:
    read = Reading(tmp_path, b'text,n\n"one\ntwo, ""three""",1\r\nfour,2\r\n', "a.csv")
    assert [(row.where, dict(row.values)) for row in read.rows] == [
        ("a.csv:2", {"text": 'one\ntwo, "three"', "n": "1"}),
        ("a.csv:4", {"text": "four", "n": "2"}),
    ]
    assert read.problems == []


def test_tabs_separate_in_tsv_and_others_where_the_source_says(tmp_path: Path) -> None:
    assert Reading(tmp_path, b"text\tn\na,b\t1\n", "a.tsv").texts == ["a,b"]
    assert Reading(tmp_path, b"text;n\na,b;1\n", "a.csv", delimiter=";").texts == ["a,b"]


def test_a_byte_order_mark_and_spaces_are_no_part_of_column_names(tmp_path: Path) -> None:
    assert Reading(tmp_path, b"\xef\xbb\xbftext , n\na,1\n", "a.csv").texts == ["a"]


def test_blank_lines_are_counted_and_no_rows(tmp_path: Path) -> None:
    read = Reading(tmp_path, b"\ntext,n\n\na,1\n\n", "a.csv")
    assert [row.where for row in read.rows] == ["a.csv:4"]
    assert read.seen.dropped == {"empty": 2}
    assert read.seen.num_rows == 1


def test_rows_that_do_not_fit_the_header_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    stored = 'text,n\n"a",1\nb\nc,1,2\n"d" e,1\n"中,1\nf",1\ng,1\n'.encode()
    read = Reading(tmp_path, stored, "a.csv")
    assert read.texts == ["a", "中,1\nf", "g"]
    assert read.problems == [
        "a.csv:3: the row has 1 column, the first row 2; quote columns with commas",
        "a.csv:4: the row has 3 columns, the first row 2; quote columns with commas",
        "a.csv:5: text follows a closing quote; double quotes inside a quoted column, and close each",
    ]
    assert read.seen.num_rows == 6
    assert read.seen.dropped == read.seen.bad == {"wrong number of columns": 2, "text after a closing quote": 1}


def test_a_stray_quote_names_the_lines_that_it_swallowed(tmp_path: Path) -> None:
    read = Reading(tmp_path, b'text,n\n"secret,1\nb,1\nc,"x"\nd,1\n', "a.csv")
    assert read.texts == ["d"]
    assert read.problems == [
        "a.csv:2: text follows a closing quote, read to line 4; double quotes inside a quoted column, and close each"
    ]


def test_a_quote_that_is_never_closed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        Reading(tmp_path, b'text,n\na,1\n"secret,1\nb,1\n', "a.csv")
    assert str(caught.value) == (
        f"{tmp_path}/a.csv:3: a quote that opens here is still open at the end of the file, line 4; close it"
    )


def test_an_open_quote_does_not_take_in_the_whole_file(tmp_path: Path) -> None:
    rows = b"x" * 1023 + b"\n"
    with pytest.raises(DataError, match=r"a.csv:3: a quote that opens here is not closed within 16 MiB; close it"):
        Reading(tmp_path, b'text\na\n"b\n' + rows * (MAX_ROW_BYTES // 1024 + 2), "a.csv")


def test_a_row_beyond_the_limit_is_left_out_and_the_next_is_read(tmp_path: Path) -> None:
    long = b'"' + b"x" * (MAX_ROW_BYTES + 5) + b'"'
    read = Reading(tmp_path, b"text\na\n" + long + b"\nb\n", "a.csv")
    assert read.texts == ["a", "b"]
    assert read.problems == ["a.csv:3: the row is longer than 16 MiB; split it"]


def test_a_column_beyond_the_interpreters_own_limit_is_read(tmp_path: Path) -> None:
    assert Reading(tmp_path, b"text\n" + b"x" * 200_000 + b"\n", "a.csv").texts == ["x" * 200_000]


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (b"", "is empty; a csv file begins with a row of column names"),
        (b"\n\n", "is empty; a csv file begins with a row of column names"),
        (
            b"txet,n\na,1\n",
            "no column 'text'; there are: 2 columns (the file may lack its header); did you mean 'txet'?",
        ),
        (b"id,prompt,n\nx,y,1\n", "no column 'text'; there are: id, prompt, n; correct the name in the set"),
        (b"text,text\na,1\n", "columns 1 and 2 are called text; rename one"),
        (b"text;n\na;1\n", "the first row is one column with ';' in it; set delimiter to that"),
        (b"text\tn\na\t1\n", 'the first row is one column with "\\t" in it; set delimiter to that'),
        (
            b"anna@example.com,13800138000\n",
            "no column 'text'; there are: 2 columns (the file may lack its header); correct the name in the set, or "
            "name the columns of a file without header in order: columns: [...]",
        ),
        (
            b"Maria Gonzalez,Berlin,Diabetes,0\n",
            "no column 'text'; there are: 4 columns (the file may lack its header); correct the name in the set, or "
            "name the columns of a file without header in order: columns: [...]",
        ),
        (
            b"Maria Gonzalez,Diabetes,Diabetes\n",
            "columns 2 and 3 are called the same (the file may lack its header); rename one",
        ),
        ("text,n\na,1\n".encode("utf-16"), "looks like UTF-16; convert it to UTF-8"),
        ("text,n\na,1\n".encode("utf-16-le"), "looks like UTF-16; convert it to UTF-8"),
    ],
)
def test_a_file_whose_first_row_is_no_header_is_refused_once(tmp_path: Path, stored: bytes, problem: str) -> None:
    with pytest.raises(DataError) as caught:
        Reading(tmp_path, stored, "a.csv")
    assert str(caught.value) == f"{tmp_path}/a.csv: {problem}"


def test_a_header_that_cannot_be_decoded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a.csv:1: the row of column names: byte 6 of the row is not UTF-8"):
        Reading(tmp_path, "text,正文\na,b\n".encode("gb18030"), "a.csv")


def test_a_multi_line_row_with_a_broken_byte_is_one_bad_row(tmp_path: Path) -> None:
    read = Reading(tmp_path, b'text,n\n"a\ncaf\xe9 \nb",1\nc,1\n', "a.csv")
    assert read.texts == ["c"]
    assert read.problems == [
        "a.csv:2: byte 4 of the row is not UTF-8; convert the file to UTF-8, or name its encoding: "
        "encoding: [utf-8, cp1252]"
    ]


def test_a_first_row_of_words_that_may_be_data_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        Reading(tmp_path, b"alice,diabetes\nbob,asthma\ncarla,migraine\n", "a.csv")
    assert "no column 'text'; there are: 2 columns (the file may lack its header)" in str(caught.value)
    assert "alice" not in str(caught.value)


WORDS = b"refund,card\nclosed,card\nlimit,transfer\n"


def test_a_first_row_whose_values_come_again_is_no_header_and_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        Reading(tmp_path, WORDS, "a.csv")
    assert str(caught.value).endswith(
        "a.csv: no column 'text'; there are: 2 columns (the first row may be data: its values come again); "
        "name the columns of a file without header in order: columns: [...]"
    )


def test_columns_name_those_of_a_file_without_header(tmp_path: Path) -> None:
    read = Reading(tmp_path, WORDS + b"a,b,c\n", "a.csv", columns=["text", "topic"])
    assert read.rows[0].where == "a.csv:1"
    assert read.rows[0].values == {"text": "refund", "topic": "card"}
    assert read.texts == ["refund", "closed", "limit"]
    assert read.problems == ["a.csv:4: the row has 3 columns, the list of columns 2; quote columns with commas"]
    with pytest.raises(DataError, match="no column 'text'; there are: subject, topic"):
        Reading(tmp_path, WORDS, "a.csv", columns=["subject", "topic"])
