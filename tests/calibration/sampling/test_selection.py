"""Mixing end to end: tokens per source and stratum, caps on groups, and what happens where one runs dry."""

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from quantpipe.calibration import Budget, CalibrationSet, build, build_calibration
from quantpipe.calibration.sampling import survey as first_pass
from quantpipe.calibration.sampling.cells import MIN_CUT_TOKENS, GroupCap
from quantpipe.errors import DataError

Make = Callable[..., Path]
Row = Mapping[str, Any]


def varied(num_rows: int, num_chars: int = 49, seed: int = 0, **labels: Any) -> list[Row]:
    """Rows of random letters, so that none is a near duplicate; each gives ``num_chars + 1`` tokens."""
    rng = random.Random(f"{seed}{labels}")
    letters = "abcdefghijklmnopqrstuvwxyz    "
    return [{"text": "x" + "".join(rng.choices(letters, k=num_chars - 2)) + "x", **labels} for _ in range(num_rows)]


def write_set(folder: Path, sources: Mapping[str, Sequence[Row]], keys: str = "", header: str = "") -> Path:
    """A set with a JSON Lines file for each source; ``keys`` are lines of every source, or by label after ``@``."""
    folder.mkdir(parents=True, exist_ok=True)
    text = f"version: 1\nname: mixed\n{header}\nsources:\n"
    for name, rows in sources.items():
        label, _, own = name.partition("@")
        (folder / f"{label}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        text += f"  - {{path: {label}.jsonl, name: {label}{', ' + own if own else ''}{', ' + keys if keys else ''}}}\n"
    (folder / "set.yaml").write_text(text, encoding="utf-8")
    return folder


def used(built: CalibrationSet) -> dict[str, int]:
    return {account.name: account.num_tokens_used for account in built.account}


def test_weights_divide_the_tokens_exactly(tmp_path: Path, make_tokenizer: Make) -> None:
    rows = {"a@weight: 2": varied(40), "b@weight: 1": varied(40, seed=1), "c@weight: 0": varied(4, seed=2)}
    built = build_calibration(write_set(tmp_path / "set", rows), make_tokenizer(), Budget(10, 100))
    assert used(built) == {"a": 667, "b": 333, "c": 0}
    assert [account.num_tokens_asked for account in built.account] == [667, 333, 0]
    assert sum(each.num_tokens_used for each in built.documents) == built.token_ids.size == 1000


def test_without_weights_a_source_gives_in_proportion_to_what_it_has(tmp_path: Path, make_tokenizer: Make) -> None:
    rows = {"a": varied(90), "b": varied(30, seed=1)}
    built = build_calibration(write_set(tmp_path / "set", rows), make_tokenizer(), Budget(10, 100))
    assert used(built) == {"a": 750, "b": 250}


def test_a_weighted_source_that_runs_dry_is_refused_by_name(tmp_path: Path, make_tokenizer: Make) -> None:
    rows = {"a@weight: 1": varied(40), "b@weight: 1": varied(4, seed=1)}
    folder, model = write_set(tmp_path / "set", rows), make_tokenizer()
    with pytest.raises(DataError) as caught:
        build_calibration(folder, model, Budget(10, 100))
    assert str(caught.value) == (
        f"{folder}/set.yaml:6:12: sources[1]: b: its weight of 1 in 2 asks for 500 tokens, it has 200; lower its "
        "weight or the number of sequences, or set calibration.allow_shortfall: true"
    )
    built = build_calibration(folder, model, Budget(10, 100), allow_shortfall=True)
    assert used(built) == {"a": 800, "b": 200}


def test_strata_give_equally_or_in_proportion(tmp_path: Path, make_tokenizer: Make) -> None:
    rows = {"a": [*varied(60, lang="en"), *varied(20, lang="zh"), *varied(20, lang="de")]}
    model = make_tokenizer()

    def by_language(header: str) -> Counter[str]:
        folder = write_set(tmp_path / "set", rows, "language: {field: lang}", header)
        built = build_calibration(folder, model, Budget(15, 100))
        counted: Counter[str] = Counter()
        for each in built.documents:
            counted[each.language] += each.num_tokens_used
        return counted

    assert by_language("stratify: [language]\nallocation: equal") == {"en": 500, "zh": 500, "de": 500}
    assert by_language("stratify: [language]") == {"en": 900, "zh": 300, "de": 300}


def test_a_stratum_that_runs_dry_leaves_its_share_to_the_others(tmp_path: Path, make_tokenizer: Make) -> None:
    rows = {"a": [*varied(60, lang="en"), *varied(4, lang="zh")]}
    folder = write_set(tmp_path / "set", rows, "language: {field: lang}", "stratify: [language]\nallocation: equal")
    built = build_calibration(folder, make_tokenizer(), Budget(10, 100))
    assert sum(each.num_tokens_used for each in built.documents if each.language == "zh") == 200
    assert used(built) == {"a": 1000}
    assert "calibration: a: 1 stratum holds less than its share (zh); the others give the rest" in built.notes


def test_strata_by_length_and_domain(tmp_path: Path, make_tokenizer: Make) -> None:
    rows = {"a": [*varied(40, topic="x"), *varied(10, 299, topic="x"), *varied(40, topic="y")]}
    header = "stratify: [length, domain]\nallocation: equal"
    folder = write_set(tmp_path / "set", rows, "domain: {field: topic}", header)
    built = build_calibration(folder, make_tokenizer(), Budget(15, 100))
    tokens: Counter[tuple[bool, str]] = Counter()
    for each in built.documents:
        tokens[each.num_tokens > 200, each.domain] += each.num_tokens_used
    assert tokens == {(False, "x"): 500, (True, "x"): 500, (False, "y"): 500}


def test_a_field_with_too_many_values_makes_no_strata(tmp_path: Path, make_tokenizer: Make) -> None:
    rows = {"a": [{**row, "lang": f"l{i}"} for i, row in enumerate(varied(100))]}
    folder = write_set(tmp_path / "set", rows, "language: {field: lang}", "stratify: [language]")
    with pytest.raises(DataError, match="a: stratify makes more than 64 strata of it"):
        build_calibration(folder, make_tokenizer(), Budget(10, 100))


@pytest.mark.parametrize("length", [98, 99, 100, 101, 102, 103, 107, 113])
@pytest.mark.parametrize("keys", ["", "language: {field: lang}", "group: who, max_group_frac: 0.2"])
def test_no_row_is_cut_to_a_few_tokens(tmp_path: Path, make_tokenizer: Make, length: int, keys: str) -> None:
    rng = random.Random(2)
    rows = [{**row, "lang": rng.choice("abc"), "who": rng.choice("defghij")} for row in varied(80)]
    header = "stratify: [language]" if "language" in keys else ""
    folder = write_set(tmp_path / "set", {"a": rows, "b": varied(40, 99, seed=1, lang="a", who="d")}, keys, header)
    built = build_calibration(folder, make_tokenizer(), Budget(7, length), allow_shortfall=True)
    assert built.is_short == ("group" in keys)  # source b is one customer
    assert built.token_ids.size == sum(used(built).values())
    assert min(each.num_tokens_used for each in built.documents) >= 8


def test_a_share_that_is_too_small_for_a_row_goes_to_another_source_with_a_note(
    tmp_path: Path, make_tokenizer: Make
) -> None:
    rows = {"a@weight: 1": varied(40), "b@weight: 0.004": varied(40, seed=1), "c@weight: 0.02": varied(40, seed=2)}
    built = build_calibration(write_set(tmp_path / "set", rows), make_tokenizer(), Budget(10, 100))
    assert used(built) == {"a": 981, "b": 0, "c": 19}
    assert built.notes[0] == "calibration: b: a share of 4 tokens is too small for a row; another gives them"


def test_a_tiny_budget_gives_each_group_enough_for_a_row(tmp_path: Path, make_tokenizer: Make) -> None:
    rows = [{**row, "who": f"c{i}"} for i, row in enumerate(varied(40))]
    built = build_calibration(write_set(tmp_path / "set", {"a": rows}, "group: who"), make_tokenizer(), Budget(1, 40))
    assert [each.num_tokens_used for each in built.documents] == [8] * 5


def test_one_customer_gives_no_more_than_its_cap(tmp_path: Path, make_tokenizer: Make) -> None:
    rng = random.Random(0)
    rows = [*varied(300, who="loud"), *[{**row, "who": f"c{i}"} for i, row in enumerate(varied(80, seed=1))]]
    rng.shuffle(rows)
    folder = write_set(tmp_path / "set", {"a": rows}, "group: who, max_group_frac: 0.1")
    built = build_calibration(folder, make_tokenizer(), Budget(20, 100))
    loud = {str(i) for i, row in enumerate(rows, start=1) if row["who"] == "loud"}
    num_loud = sum(each.num_tokens_used for each in built.documents if each.where.split(":")[1] in loud)
    assert used(built) == {"a": 2000}
    assert num_loud == 200
    assert built.account[0].dropped["over the group cap"] > 100


def test_too_few_customers_are_told_about_the_cap(tmp_path: Path, make_tokenizer: Make) -> None:
    rows = [row for name in "abcd" for row in varied(40, who=name)]
    folder = write_set(tmp_path / "set", {"a": rows}, "group: who")
    with pytest.raises(DataError, match=r"over the group cap; .* raise max_group_frac, or set"):
        build_calibration(folder, make_tokenizer(), Budget(20, 100))


def test_a_row_that_does_not_fit_its_group_is_cut_and_closes_it() -> None:
    cap = GroupCap(100)
    assert [cap.take("a", 60), cap.take("a", 60), cap.take("a", 10)] == [60, 40, 0]
    assert [cap.take("b", 300), cap.take("b", 1)] == [100, 0]
    assert [cap.take("c", 100 - MIN_CUT_TOKENS + 1), cap.take("c", 60), cap.take("c", 1)] == [85, 0, 0]
    assert cap.closed == {"a", "b", "c"}


@pytest.mark.parametrize("keys", ["", "group: who, max_group_frac: 0.2"])
@pytest.mark.parametrize("header", ["", "stratify: [length]\nnear_duplicates: 0.5"])
def test_blocks_do_not_depend_on_the_size_of_the_pools(
    tmp_path: Path, make_tokenizer: Make, monkeypatch: pytest.MonkeyPatch, keys: str, header: str
) -> None:
    rng = random.Random(1)
    rows = [{**row, "who": rng.choice("aaaabcdefg")} for row in [*varied(150), *varied(50, 250)]]
    rows += [{**row, "text": row["text"] + " copied"} for row in rows[:100]]  # near duplicates, dropped at 0.5
    rows += [{**row, "who": "copycat"} for row in rows[:20]]
    rng.shuffle(rows)
    folder, model = write_set(tmp_path / "set", {"a": rows}, keys, header), make_tokenizer()
    whole = build_calibration(folder, model, Budget(20, 100))
    monkeypatch.setattr(first_pass, "CHARS_PER_TOKEN", 1)
    monkeypatch.setattr(first_pass, "MIN_POOL_CHARS", 200)
    small = build_calibration(folder, model, Budget(20, 100))
    assert small.digest == whole.digest
    assert small.documents == whole.documents


def test_the_order_of_rows_in_the_files_does_not_matter(tmp_path: Path, make_tokenizer: Make) -> None:
    rows, model = varied(60), make_tokenizer()
    forward = build_calibration(write_set(tmp_path / "set", {"a": rows}), model, Budget(10, 100))
    backward = build_calibration(write_set(tmp_path / "set", {"a": rows[::-1]}), model, Budget(10, 100))
    assert forward.digest == backward.digest


def test_an_account_that_did_not_look_at_every_row_says_so(
    tmp_path: Path, make_tokenizer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_pass, "CHARS_PER_TOKEN", 2)
    monkeypatch.setattr(first_pass, "MIN_POOL_CHARS", 200)
    built = build_calibration(write_set(tmp_path / "set", {"a": varied(400)}), make_tokenizer(), Budget(10, 100))
    (account,) = built.account
    assert account.is_estimate
    assert account.num_samples_available == 400
    assert account.num_tokens_available == pytest.approx(20_000, rel=0.05)


def test_rows_that_are_nearly_all_dropped_end_before_memory_does(
    tmp_path: Path, make_tokenizer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_pass, "MIN_POOL_CHARS", 200)
    monkeypatch.setattr(first_pass, "CHARS_PER_TOKEN", 1)
    monkeypatch.setattr(build, "MOST_POOL_CHARS", 4 * 400)
    folder = write_set(tmp_path / "set", {"a": varied(400)}, header="packing: truncate")
    with pytest.raises(DataError, match="rows do not fill the budget, so nearly all are dropped"):
        build_calibration(folder, make_tokenizer(), Budget(4, 100))


def test_a_cap_that_cuts_most_samples_is_noted(tmp_path: Path, make_tokenizer: Make) -> None:
    rows = [{**row, "who": str(i)} for i, row in enumerate(varied(40, num_chars=199))]
    model = make_tokenizer()
    tight = build_calibration(write_set(tmp_path / "a", {"a": rows}, "group: who"), model, Budget(10, 100))
    assert [note for note in tight.notes if "max_group_frac" in note] == [
        "calibration: a: max_group_frac 0.05 has cut 20 of 20 samples short; raise it, or ask for more tokens"
    ]
    wide = build_calibration(
        write_set(tmp_path / "b", {"a": rows}, "group: who, max_group_frac: 0.5"), model, Budget(10, 100)
    )
    assert not [note for note in wide.notes if "max_group_frac" in note]
