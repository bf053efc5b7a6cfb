import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpipe.calibration.checks.leakage import EvalText, Leak, LeakageIndex, LeakReport
from quantpipe.errors import DataError

QUESTION = "How long does it usually take until a new card arrives at my home address?"
PASSAGE = (
    "The ferry to the northern islands leaves twice a day in summer and once a day in winter. Tickets are sold at the "
    "harbour office until ten minutes before departure, and bicycles travel free of charge on every crossing."
)


def index_of(*texts: str) -> LeakageIndex:
    return LeakageIndex(EvalText("evals/support", f"items.jsonl:{i}", text) for i, text in enumerate(texts, 1))


def kind_of(sample: str, *texts: str) -> str | None:
    leak = index_of(*texts).find(sample)
    return None if leak is None else leak.kind


@pytest.mark.parametrize(
    "sample",
    [
        QUESTION,
        QUESTION.upper() + "  ",
        QUESTION.translate({code: code + 0xFEE0 for code in range(0x21, 0x7F)}),
        f"Hello there\n{QUESTION}\nAbout five working days.",
    ],
    ids=["the same", "case and space", "full width", "one line of a conversation"],
)
def test_equal_text_is_found_as_exact(sample: str) -> None:
    assert index_of("Something else that nobody asks", QUESTION).find(sample) == Leak(
        "exact", "evals/support", "items.jsonl:2"
    )


def test_text_inside_a_sample_is_found_as_near() -> None:
    assert kind_of(f"He wrote: {QUESTION} We told him.", QUESTION) == "near"


def test_changed_ending_is_found_as_near() -> None:
    assert kind_of(QUESTION.replace("at my home address", "in Norway"), QUESTION) == "near"


def test_sample_cut_out_of_a_long_evaluation_text_is_found_as_near() -> None:
    assert (
        kind_of("Tickets are sold at the harbour office until ten minutes before the train, and bicycles", PASSAGE)
        is None
    )
    assert (
        kind_of(
            "Tickets are sold at the harbour office until ten minutes before departure, and bicycles travel free",
            PASSAGE,
        )
        == "near"
    )


@pytest.mark.parametrize("num_words", range(1, 33))
def test_row_that_lies_whole_in_a_longer_evaluation_text_is_found_from_eight_words_on(num_words: int) -> None:
    of_passage = PASSAGE.split()
    for start in range(len(of_passage) - num_words + 1):
        row = " ".join(of_passage[start : start + num_words]).upper()
        assert kind_of(row, QUESTION, PASSAGE) == ("near" if num_words >= 8 else None)
        if num_words in (8, 15):
            assert kind_of(f"{row} indeed", QUESTION, PASSAGE) == ("near" if num_words == 15 else None)


def test_unrelated_texts_are_not_found() -> None:
    assert kind_of("Please tell me how long the transfer of my salary takes", QUESTION, PASSAGE) is None
    assert kind_of("", QUESTION) is None
    assert kind_of("??", QUESTION, "") is None


def test_less_than_half_in_common_is_not_found() -> None:
    assert kind_of("The ferry to the northern islands leaves twice a day, as you know.", PASSAGE) is None


@pytest.mark.parametrize(
    ("sample", "text", "kind"),
    [
        ("What is my PIN", "What is my PIN?", "exact"),
        ("Hi.\nWhat is my PIN?\nI cannot say.", "What is my PIN?", "exact"),
        ("Tell me: what is my PIN and why?", "What is my PIN?", None),
        ("Yes", "yes.", "exact"),
        ("Is it open?\nYes", "yes.", None),
        ("您好\n我的卡丢了怎么办？\n请挂失", "我的卡丢了怎么办", "exact"),
        ("请问我的卡丢了怎么办呢，急", "我的卡丢了怎么", None),
        ("请问我的银行卡丢了怎么办呢，急", "我的银行卡丢了怎么办", "near"),
    ],
)
def test_short_evaluation_text_counts_only_whole(sample: str, text: str, kind: str | None) -> None:
    assert kind_of(sample, text) == kind


def test_group_on_both_sides_is_found_whatever_the_text() -> None:
    index = LeakageIndex([EvalText("evals/a", "x:1", QUESTION, group="c7"), EvalText("evals/b", "y:1", PASSAGE)])
    assert index.find("nothing alike", group=" c7 ") == Leak("group", "evals/a", "x:1")
    assert index.find("nothing alike", group="c8") is None
    assert index.find("nothing alike", group="") is None
    found = index.find(QUESTION, group="c7")
    assert found is not None
    assert found.kind == "exact"


def test_best_match_is_named_and_of_equal_ones_the_first() -> None:
    index = index_of(PASSAGE, QUESTION, QUESTION, PASSAGE + " Dogs need a ticket.")
    near_question, near_passage = index.find(f"x {QUESTION} y"), index.find(f"x {PASSAGE} y")
    assert near_question is not None
    assert near_passage is not None
    assert (near_question.row, near_passage.row) == ("items.jsonl:2", "items.jsonl:1")


def test_empty_index_finds_nothing() -> None:
    index = LeakageIndex([])
    assert index.num_texts == 0
    assert index.find(QUESTION, "c1") is None


WORD = st.sampled_from([f"w{i}" for i in range(300)])


def share_in(text: list[str], other: list[str]) -> float:
    """Share of the distinct runs of eight words of ``text`` that are in ``other``, written out plainly."""
    runs = [{tuple(of[i : i + 8]) for i in range(len(of) - 7)} for of in (text, other)]
    return len(runs[0] & runs[1]) / len(runs[0])


@settings(deadline=None)
@given(st.lists(WORD, min_size=8, max_size=40), st.data())
def test_near_is_half_of_the_runs_of_either_side(text: list[str], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, len(text)))
    padding = st.lists(WORD.map(lambda word: f"other{word}"), max_size=30)
    sample = [*data.draw(padding), *text[start:stop], *data.draw(padding)]
    is_near = len(sample) >= 8 and share_in(text, sample) >= 0.5
    least = 0.5 if len(sample) >= 16 else 1.0
    is_near = is_near or (len(sample) >= 8 and share_in(sample, text) >= least)
    kind = "exact" if sample == text else "near" if is_near else None
    assert kind_of(" ".join(sample), "unrelated words of another item in the suite", " ".join(text)) == kind


def test_planted_leaks_are_all_found_among_many_texts() -> None:
    generator = random.Random(3)

    def text() -> str:
        return " ".join(f"w{generator.randrange(5000)}" for _ in range(generator.randrange(12, 40)))

    texts = [text() for _ in range(500)]
    index = LeakageIndex(EvalText("s", str(i), each, f"group {i}") for i, each in enumerate(texts))
    for i, each in enumerate(texts):
        assert index.find(each.title()) == Leak("exact", "s", str(i))
        assert index.find(f"Somebody said {each} to me") == Leak("near", "s", str(i))
        assert index.find(text(), f"group {i}") == Leak("group", "s", str(i))
        assert index.find(text()) is None


def test_report_counts_by_set_and_kind_with_the_first_rows() -> None:
    report = LeakReport()
    for i in range(12):
        report.add(f"tickets.csv:{i}", Leak("exact", "evals/support", f"items.jsonl:{i}"))
    report.add("tickets.csv:40", Leak("near", "evals/support", "items.jsonl:3"))
    report.add("tickets.csv:41", Leak("group", "evals/other", "x.jsonl:1"))
    report.add("tickets.csv:42", Leak("near", "held out", "tickets.csv:9", is_held_out=True))
    first, second = report.lines("tickets")
    assert first.startswith(
        "calibration set tickets: 13 rows overlap evals/support (12 exact, 1 near): tickets.csv:0 = "
    )
    assert len(re.findall(" = ", first)) == 10
    assert first.endswith(", ...")
    assert second == "calibration set tickets: 1 row overlaps evals/other (1 group): tickets.csv:41 = x.jsonl:1"
    assert report.num_rows == 15
    with pytest.raises(DataError, match=r"items\.jsonl:9, \.\.\.; remove them or set calibration\.on_leakage: drop\n"):
        report.raise_if_any("tickets")


def test_overlap_with_held_out_rows_is_counted_but_not_refused() -> None:
    index = LeakageIndex([EvalText("held out", "tickets.csv:9", QUESTION, is_held_out=True)])
    report = LeakReport()
    leak = index.find(QUESTION)
    assert leak is not None
    report.add("tickets.csv:1", leak)
    report.raise_if_any("tickets")
    assert report.num_held_out == 1
