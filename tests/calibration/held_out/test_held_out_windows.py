"""Which domains the windows are of: in proportion to what is held out of each, whatever they are called."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from quantpipe.calibration.definition.set_definition import SetDefinition, load_set
from quantpipe.calibration.held_out import held_out_windows
from quantpipe.calibration.held_out.held_out_rows import HeldOut, read_held_out
from quantpipe.calibration.held_out.held_out_windows import SEVERAL, DomainPools
from quantpipe.calibration.rows import Sample

Rows = Sequence[tuple[str, str]]  # topic, text
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ROW_CHARS = 59


def rows_of(sizes: Mapping[str, int]) -> Rows:
    """So many rows of each topic, each of 60 tokens with its EOS."""
    generator = random.Random(1)
    return [
        (topic, f"{i:04} " + "".join(generator.choices(LETTERS, k=ROW_CHARS - 5)))
        for topic, size in sizes.items()
        for i in range(size)
    ]


@pytest.fixture
def hold(tmp_path: Path, make_tokenizer: Callable[..., Path]) -> Callable[..., HeldOut]:
    """Windows of a set that holds out all of its rows."""
    model = make_tokenizer()

    def hold_out(rows: Rows, num_windows: int, window_tokens: int = 60, equally: bool = False) -> HeldOut:
        return read_held_out(write_set(tmp_path, rows), model, num_windows, window_tokens, equally=equally)

    return hold_out


def write_set(folder: Path, rows: Rows) -> SetDefinition:
    lines = [f"{topic}\t{text}\n" for topic, text in rows]
    (folder / "rows.tsv").write_text("topic\ttext\n" + "".join(lines))
    (folder / "set.yaml").write_text(
        "version: 1\nname: tiny\nholdout: {frac: 0.999999}\nsources:\n  - {path: rows.tsv, domain: {field: topic}}\n"
    )
    return load_set(folder)


def counts(found: HeldOut) -> Counter[str]:
    return Counter(window.domain for window in found.windows)


def test_domains_have_windows_in_proportion_to_their_text(hold: Callable[..., HeldOut]) -> None:
    found = hold(rows_of({"a": 10, "b": 30, "z": 60}), 20)
    assert counts(found) == {"a": 2, "b": 6, "z": 12}
    assert found.notes == ()


def test_domains_have_as_many_windows_each_where_that_is_asked(hold: Callable[..., HeldOut]) -> None:
    assert counts(hold(rows_of({"a": 10, "b": 30, "z": 60}), 12, equally=True)) == {"a": 4, "b": 4, "z": 4}


def test_more_domains_than_windows_are_not_chosen_by_name_and_what_is_missing_is_said(
    hold: Callable[..., HeldOut],
) -> None:
    names = [f"topic {chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(78)]
    found = hold(rows_of(dict.fromkeys(names, 3)), 16)
    measured = set(counts(found))
    assert len(measured) == 16
    assert len(measured & set(names[:16])) < 10
    [note] = found.notes
    assert note.startswith("held-out rows: 16 windows, 78 domains: 62 are not measured, such as topic ")
    assert "(1.3 % of the held-out text)" in note


def test_the_largest_domains_come_first_and_the_largest_that_is_missing_is_named(hold: Callable[..., HeldOut]) -> None:
    found = hold(rows_of({"aa": 1, "bb": 2, "cc": 40, "dd": 57}), 2)
    assert counts(found) == {"cc": 1, "dd": 1}
    assert found.notes == (
        "held-out rows: 2 windows, 4 domains: 2 are not measured, such as bb (2 % of the held-out text); "
        "raise num_windows to measure more",
    )


def test_a_name_that_looks_like_data_is_not_said(hold: Callable[..., HeldOut]) -> None:
    [note] = hold(rows_of({"x": 50, "Mrs Jones asked us to call back tomorrow": 1}), 2).notes
    assert "1 is not measured, (a name of 40 characters) (2 % of the held-out text)" in note


def test_what_a_domain_lacks_goes_to_joined_rests_and_then_to_the_others(hold: Callable[..., HeldOut]) -> None:
    small = {f"s{i}": 1 for i in "abcdefgh"}
    found = hold(rows_of(small | {"large": 8}), 8, 120)  # 60 tokens of each small domain: none fills a window
    assert counts(found) == {"large": 4, SEVERAL: 4}
    assert found.notes == ()


def test_the_windows_do_not_depend_on_the_order_of_rows_with_any_number_of_domains(
    hold: Callable[..., HeldOut], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_out_windows, "MOST_DOMAINS", 4)
    rows = list(rows_of({f"t{i}": 4 + i for i in range(12)}))
    first = hold(rows, 12)
    random.Random(3).shuffle(rows)
    assert hold(rows, 12).windows == first.windows
    assert counts(first)[SEVERAL] >= 6
    assert first.notes[0].startswith("held-out rows: 12 windows, more than 4 domains: 1 is not measured, t")


def test_a_pool_of_several_domains_counts_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out_windows, "MOST_DOMAINS", 2)
    pools = DomainPools(300)
    for rank in range(60):
        pools.pool(f"t{rank % 6}").offer(rank, Sample("", "x"), 20)
    assert sum(pool.num_rows for _, pool in pools.items()) == 60
    assert sum(pool.num_chars for _, pool in pools.items()) == 1200
    name, several = list(pools.items())[-1]
    ranks = [entry.rank for entry in several.entries()]
    others = [rank for rank in range(60) if f"t{rank % 6}" not in dict(pools.items())]
    assert name == SEVERAL
    assert ranks == others[: len(ranks)] and several.limit == others[len(ranks)]
