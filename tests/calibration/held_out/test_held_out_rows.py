"""The held-out rows of a set as windows to evaluate on: the right rows, redacted, by domain, never calibrated on."""

import csv
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from quantpipe.calibration.build import build_calibration
from quantpipe.calibration.calibration_set import Budget, BuildContext
from quantpipe.calibration.checks.holdout import holdout_key, is_held_out
from quantpipe.calibration.definition.set_definition import SetDefinition, load_set
from quantpipe.calibration.held_out.held_out_rows import read_held_out
from quantpipe.calibration.held_out.held_out_windows import SEVERAL
from quantpipe.errors import DataError

LETTERS = "abcdefghijklmnopqrstuvwxyz"
CUSTOMER = re.compile(r"<(c\d{3})>")
Row = tuple[str, str, str]  # customer, topic, text


def rows_of(num_customers: int, num_each: int = 3, topics: Sequence[str] = ("cards", "loans")) -> list[Row]:
    """Rows that name their customer, otherwise of random letters."""
    generator = random.Random(1)
    return [
        (
            f"c{customer:03}",
            topics[customer % len(topics)],
            f"<c{customer:03}> " + " ".join("".join(generator.choices(LETTERS, k=5)) for _ in range(8)),
        )
        for customer in range(num_customers)
        for _ in range(num_each)
    ]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., SetDefinition]:
    """Write a set of one CSV file, with a group and a domain of each row."""

    def write(rows: Sequence[Row], holdout: str = "holdout: {frac: 0.3, salt: a}", more: str = "") -> SetDefinition:
        with (tmp_path / "rows.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("customer", "topic", "text"), *rows])
        (tmp_path / "set.yaml").write_text(
            f"version: 1\nname: tiny\n{holdout}\nsources:\n"
            f"  - path: rows.csv\n    group: customer\n    domain: {{field: topic}}\n    {more}\n"
        )
        return load_set(tmp_path)

    return write


def texts_of(windows: Sequence[Sequence[int]], folder: Path) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [str(tokenizer.decode(window)) for window in windows]


def held_out_customers(rows: Sequence[Row], salt: str = "a") -> set[str]:
    return {customer for customer, _, text in rows if is_held_out(holdout_key(customer, text), salt, 0.3)}


def test_windows_hold_the_held_out_rows_and_blocks_the_others(
    make: Callable[..., SetDefinition], make_tokenizer: Callable[..., Path]
) -> None:
    rows, folder = rows_of(60), make_tokenizer()
    definition, customers = make(rows), held_out_customers(rows)
    held_out = read_held_out(definition, folder, 12, 100)
    evaluated = "".join(texts_of([window.token_ids for window in held_out.windows], folder))
    built = build_calibration(definition, folder, Budget(40, 100), context=BuildContext(eval_texts=held_out.texts))
    calibrated = "".join(texts_of(built.token_ids.tolist(), folder))
    assert set(CUSTOMER.findall(evaluated)) <= customers
    assert not set(CUSTOMER.findall(calibrated)) & customers
    assert len(set(CUSTOMER.findall(calibrated))) > 20


def test_domains_take_turns_and_rows_end_with_eos(
    make: Callable[..., SetDefinition], make_tokenizer: Callable[..., Path]
) -> None:
    rows, folder = rows_of(60), make_tokenizer()
    held_out = read_held_out(make(rows), folder, 6, 100)
    first, second, *_ = [window.domain for window in held_out.windows]
    assert [window.domain for window in held_out.windows] == [first, second] * 3
    assert {first, second} == {"cards", "loans"}
    assert {len(window.token_ids) for window in held_out.windows} == {100}
    by_domain = held_out.by_domain()
    assert [len(by_domain[name]) for name in ("cards", "loans")] == [3, 3]
    cards = "".join(texts_of(by_domain["cards"], folder))
    whole_rows = cards.split("</s>")[:-1]
    assert len(whole_rows) >= 4
    assert set(whole_rows) <= {text for _, topic, text in rows if topic == "cards"}


def test_the_same_windows_whatever_the_order_of_the_rows(
    make: Callable[..., SetDefinition], make_tokenizer: Callable[..., Path]
) -> None:
    rows, folder = rows_of(60), make_tokenizer()
    first = read_held_out(make(rows), folder, 8, 100).windows
    assert read_held_out(make(rows[::-1]), folder, 8, 100).windows == first
    assert read_held_out(make(rows), folder, 4, 100).windows == first[:4]
    other = make(rows, holdout="holdout: {frac: 0.3, salt: b}")
    assert read_held_out(other, folder, 8, 100).windows != first


def test_small_domains_are_joined(make: Callable[..., SetDefinition], make_tokenizer: Callable[..., Path]) -> None:
    rows = rows_of(60, topics=[f"topic {i:02}" for i in range(60)])
    held_out = read_held_out(make(rows), make_tokenizer(), 4, 400)
    assert {window.domain for window in held_out.windows} == {SEVERAL}


def test_pools_that_were_too_small_are_read_again(
    make: Callable[..., SetDefinition], make_tokenizer: Callable[..., Path]
) -> None:
    copies = [
        ("c999", "cards", "<c999> " + "almost the same words in every one of these rows " * 8 + str(i))
        for i in range(300)
    ]
    rows = rows_of(60, topics=["cards"]) + copies
    salt = next(str(i) for i in range(100) if is_held_out(holdout_key("c999", ""), str(i), 0.3))
    definition = make(rows, holdout=f"holdout: {{frac: 0.3, salt: '{salt}'}}")
    windows = read_held_out(definition, make_tokenizer(), 8, 100).windows
    assert len(windows) == 8


def test_windows_are_redacted(make: Callable[..., SetDefinition], make_tokenizer: Callable[..., Path]) -> None:
    rows = [(customer, topic, f"{text} mail me: {customer}@example.com") for customer, topic, text in rows_of(60)]
    folder = make_tokenizer()
    evaluated = "".join(texts_of([w.token_ids for w in read_held_out(make(rows), folder, 12, 100).windows], folder))
    assert "example.com" not in evaluated
    assert "EMAIL" in evaluated


def test_truncated_windows_each_begin_a_row(
    make: Callable[..., SetDefinition], make_tokenizer: Callable[..., Path]
) -> None:
    rows, folder = rows_of(60), make_tokenizer()
    held_out = read_held_out(make(rows, holdout="holdout: {frac: 0.3}\npacking: truncate"), folder, 6, 30)
    texts = texts_of([window.token_ids for window in held_out.windows], folder)
    assert set(texts) <= {text[:30] for _, _, text in rows}
    assert len(set(texts)) == 6


def test_calibration_row_like_a_held_out_one_is_left_out_and_counted(
    make: Callable[..., SetDefinition], make_tokenizer: Callable[..., Path]
) -> None:
    rows, folder = rows_of(60), make_tokenizer()
    customers = held_out_customers(rows)
    copied = [text.removeprefix("<") for customer, _, text in rows if customer in customers]
    kept = next(customer for customer, _, _ in rows if customer not in customers)
    definition = make([*rows, *((kept, "cards", f"somebody wrote {text} again") for text in copied)])
    held_out = read_held_out(definition, folder, 12, 100)
    built = build_calibration(definition, folder, Budget(40, 100), context=BuildContext(eval_texts=held_out.texts))
    [account] = built.account
    assert account.dropped["like a held-out row"] == len({text.row for text in held_out.texts})


@pytest.mark.parametrize("frac", [0.05, 0.9])
def test_too_few_held_out_rows_are_refused_with_counts(
    make: Callable[..., SetDefinition], make_tokenizer: Callable[..., Path], frac: float
) -> None:
    definition = make(rows_of(60), holdout=f"holdout: {{frac: {frac}}}")
    with pytest.raises(DataError, match=r"rows that holdout keeps out give \d+ windows of 100 tokens; 500 are needed"):
        read_held_out(definition, make_tokenizer(), 500, 100)


def test_set_that_holds_nothing_out_is_refused(
    make: Callable[..., SetDefinition], make_tokenizer: Callable[..., Path]
) -> None:
    with pytest.raises(DataError, match="nothing is held out to evaluate on; add holdout"):
        read_held_out(make(rows_of(4), holdout=""), make_tokenizer(), 4, 100)


def test_bad_row_is_refused_as_in_a_build(
    make: Callable[..., SetDefinition], make_tokenizer: Callable[..., Path]
) -> None:
    rows = [*rows_of(60), ("c1", "cards", "")]
    with pytest.raises(DataError, match=r"rows\.csv:182: .*empty"):
        read_held_out(make(rows), make_tokenizer(), 4, 100)
    dropping = make(rows, holdout="holdout: {frac: 0.3}\nbad_rows: drop")
    assert len(read_held_out(dropping, make_tokenizer(), 4, 100).windows) == 4
