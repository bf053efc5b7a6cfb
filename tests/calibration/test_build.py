"""Building a set end to end: exact sizes, accounts, digests, and what is refused before a run."""

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from quantpipe.calibration import Budget, BuildContext, SourceAccount, build_calibration
from quantpipe.calibration.calibration_set import digest_blocks
from quantpipe.calibration.checks.holdout import holdout_key, is_held_out
from quantpipe.calibration.checks.leakage import EvalText
from quantpipe.errors import DataError

Make = Callable[..., Path]
EOS = 257


def text_rows(num_rows: int, num_chars: int) -> list[str]:
    """Different rows of equal length; with one token per byte and EOS, each is ``num_chars + 1`` tokens."""
    return [json.dumps({"text": f"{i:04d}" + "x" * (num_chars - 4)}) for i in range(num_rows)]


def test_blocks_have_exactly_the_asked_shape_and_follow_from_the_seed(make_set: Make, make_tokenizer: Make) -> None:
    folder, model = make_set(text_rows(40, 19)), make_tokenizer()
    first = build_calibration(folder, model, Budget(10, 32), seed=3)
    again = build_calibration(folder, model, Budget(10, 32), seed=3)
    other = build_calibration(folder, model, Budget(10, 32), seed=4)
    assert first.token_ids.shape == (10, 32)
    assert first.token_ids.dtype == np.int64
    assert first.token_ids.tobytes() == again.token_ids.tobytes()
    assert first.digest == again.digest != other.digest
    assert not first.is_short
    assert first.notes == ()


def test_a_tokenizer_that_pads_and_truncates_gives_the_same_blocks(make_set: Make, make_tokenizer: Make) -> None:
    """Statistics are taken over every token of a block, so none may be padding."""
    folder, plain, padding = make_set(text_rows(40, 19)), make_tokenizer(), make_tokenizer(name="padding")
    changed = Tokenizer.from_file(str(padding / "tokenizer.json"))
    changed.enable_padding(direction="left", length=64, pad_id=0, pad_token="!")
    changed.enable_truncation(max_length=8)
    changed.save(str(padding / "tokenizer.json"))
    settings = json.loads((padding / "tokenizer_config.json").read_text())
    settings |= {"padding_side": "left", "pad_token": "</s>", "model_max_length": 8}
    (padding / "tokenizer_config.json").write_text(json.dumps(settings))
    expected, found = (build_calibration(folder, model, Budget(10, 32)) for model in (plain, padding))
    assert found.digest == expected.digest


def test_every_packed_sample_is_whole_and_closed_by_one_eos(make_set: Make, make_tokenizer: Make) -> None:
    built = build_calibration(make_set(text_rows(40, 19)), make_tokenizer(), Budget(10, 32))
    row = built.token_ids.ravel()
    assert (np.flatnonzero(row == EOS) == np.arange(19, 320, 20)).all()


def test_account_says_what_was_available_used_and_cut(make_set: Make, make_tokenizer: Make) -> None:
    built = build_calibration(make_set(text_rows(40, 19)), make_tokenizer(), Budget(3, 33))
    assert built.account == (
        SourceAccount(
            name="rows.jsonl",
            num_samples_available=40,
            num_samples_used=5,
            num_tokens_available=800,
            num_tokens_used=99,
            num_samples_truncated=1,
            num_tokens_asked=99,
            domain="rows.jsonl",
        ),
    )


def test_shortfall_is_refused_with_exact_counts(make_set: Make, make_tokenizer: Make) -> None:
    folder = make_set(text_rows(60, 19))
    with pytest.raises(DataError) as caught:
        build_calibration(folder, make_tokenizer(), Budget(64, 100))
    assert str(caught.value) == (
        f"{folder}/set.yaml:3:1: asked for 64 x 100 = 6,400 tokens; the set has 1,200 (12 x 100); lower "
        "calibration.num_sequences to 12, lower calibration.sequence_length, or set calibration.allow_shortfall: true"
    )


def test_following_the_shortfall_message_succeeds(make_set: Make, make_tokenizer: Make) -> None:
    folder, model = make_set(text_rows(60, 19)), make_tokenizer()
    built = build_calibration(folder, model, Budget(12, 100))
    assert built.account[0].num_tokens_used == built.account[0].num_tokens_available == 1200
    with pytest.raises(DataError, match="12 x 100"):
        build_calibration(folder, model, Budget(13, 100))


def test_allowed_shortfall_uses_all_whole_blocks_and_is_recorded(make_set: Make, make_tokenizer: Make) -> None:
    built = build_calibration(make_set(text_rows(60, 19)), make_tokenizer(), Budget(64, 100), allow_shortfall=True)
    assert built.token_ids.shape == (12, 100)
    assert (built.num_sequences_asked, built.is_short) == (64, True)
    assert built.notes == ("calibration: 12 of 64 sequences, as allow_shortfall permits",)


def test_less_than_one_block_is_refused_even_where_shortfall_is_allowed(make_set: Make, make_tokenizer: Make) -> None:
    with pytest.raises(
        DataError, match=r"the set has 40, less than one sequence; lower .*sequence_length to at most 40"
    ):
        build_calibration(make_set(text_rows(2, 19)), make_tokenizer(), Budget(4, 512), allow_shortfall=True)


def test_changed_content_under_the_same_path_changes_the_digest(make_set: Make, make_tokenizer: Make) -> None:
    rows, model = text_rows(40, 19), make_tokenizer()
    before = build_calibration(make_set(rows), model, Budget(25, 32))
    after = build_calibration(make_set([row.replace("0007x", "0007y") for row in rows]), model, Budget(25, 32))
    assert before.digest != after.digest


def test_digest_covers_the_shape_and_every_token() -> None:
    tokens = np.arange(12, dtype=np.int64)
    changed = tokens.copy()
    changed[11] += 1
    digests = {digest_blocks(each) for each in (tokens.reshape(3, 4), tokens.reshape(4, 3), changed.reshape(3, 4))}
    assert len(digests) == 3


def test_random_state_of_the_caller_is_untouched(make_set: Make, make_tokenizer: Make) -> None:
    folder, model = make_set(text_rows(40, 19)), make_tokenizer()
    python_state, numpy_state = random.getstate(), np.random.get_state(legacy=False)
    build_calibration(folder, model, Budget(2, 32))
    assert random.getstate() == python_state
    assert np.array_equal(np.random.get_state(legacy=False)["state"]["key"], numpy_state["state"]["key"])


def test_bad_rows_are_all_named_before_anything_is_built(make_set: Make, make_tokenizer: Make) -> None:
    folder = make_set(['{"text": "fine"}', '{"text": 5}', '{"body": "wrong"}'])
    with pytest.raises(DataError) as caught:
        build_calibration(folder, make_tokenizer(), Budget(1, 8), allow_shortfall=True)
    assert str(caught.value).splitlines() == [
        f"{folder}/rows.jsonl:2: field 'text' is a number; it must be text",
        f"{folder}/rows.jsonl:3: no field 'text'; there are: body",
    ]


def test_source_without_rows_is_refused(make_set: Make, make_tokenizer: Make) -> None:
    folder = make_set([])
    with pytest.raises(DataError, match=r"set.yaml:5:11: sources\[0\]: rows.jsonl gave no samples"):
        build_calibration(folder, make_tokenizer(), Budget(1, 8))


def test_one_sentence_repeated_counts_once(make_set: Make, make_tokenizer: Make) -> None:
    folder = make_set([json.dumps({"text": "the same sentence"})] * 200)
    with pytest.raises(DataError, match=r"the set has 18, less than .* after dropping rows: 199 exact duplicate"):
        build_calibration(folder, make_tokenizer(), Budget(20, 32))


def test_few_or_very_short_samples_are_noted(make_set: Make, make_tokenizer: Make) -> None:
    model = make_tokenizer()
    few = build_calibration(make_set(text_rows(4, 99)), model, Budget(3, 100))
    assert few.notes == ("calibration: only 3 different samples; statistics will follow these few texts",)
    short = build_calibration(make_set(text_rows(100, 6)), model, Budget(4, 64))
    assert short.notes == ("calibration: samples are very short (6.9 tokens on average); give longer ones",)


def test_template_without_conversations_in_the_tokenizer_is_refused(make_set: Make, make_tokenizer: Make) -> None:
    rows = [json.dumps({"messages": [{"role": "user", "content": "hello"}]})]
    folder = make_set(rows, "fields: {messages: messages}")
    with pytest.raises(DataError, match="no chat template, which template: tokenizer needs"):
        build_calibration(folder, make_tokenizer(template=None), Budget(1, 8))


def test_added_source_leaves_the_order_of_the_first_one_alone(make_set: Make, make_tokenizer: Make) -> None:
    rows, model = text_rows(40, 19), make_tokenizer()
    folder = make_set(rows)
    alone = samples_with_x(build_calibration(folder, model, Budget(25, 32)).token_ids)
    (folder / "more.jsonl").write_text("\n".join(json.dumps({"text": "m" * 19 + str(i)}) for i in range(40)))
    with (folder / "set.yaml").open("a") as definition:
        definition.write("  - {kind: jsonl, path: more.jsonl, fields: {text: text}}\n")
    both = samples_with_x(build_calibration(folder, model, Budget(50, 32)).token_ids)
    assert 20 < len(both) <= len(alone) == 40
    # The last row is cut to the end of its source's share. Where that leaves it fewer than 8 tokens, it takes them from
    # the row before, which is then cut too. Whatever is cut is a beginning of the same row, closed by EOS.
    is_whole = [piece == row for piece, row in zip(both, alone, strict=False)]
    assert all(is_whole[:-2]) and is_whole == sorted(is_whole, reverse=True)
    assert [piece[:-1] for piece in both] == [row[: len(piece) - 1] for piece, row in zip(both, alone, strict=False)]
    assert is_whole[-2] or len(both[-1]) == 8 == len(both[-2]) - 10


def samples_with_x(token_ids: npt.NDArray[np.int64]) -> list[list[int]]:
    """The whole samples in packed blocks that hold an 'x'."""
    x_id = sorted(ByteLevel.alphabet()).index("x")
    row = token_ids.ravel()
    pieces = np.split(row, np.flatnonzero(row == EOS) + 1)[:-1]
    return [piece.tolist() for piece in pieces if x_id in piece]


def with_keys(folder: Path, header: str) -> Path:
    """The set with further keys at its top."""
    text = (folder / "set.yaml").read_text(encoding="utf-8")
    (folder / "set.yaml").write_text(text.replace("name: tiny", f"name: tiny\n{header}"), encoding="utf-8")
    return folder


def text_of(token_ids: npt.NDArray[np.int64], model: Path) -> str:
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(model).decode(token_ids.ravel()))


def test_values_are_redacted_before_they_become_tokens_and_are_counted(make_set: Make, make_tokenizer: Make) -> None:
    rows, model = [f"{i:04d} write to jane.doe{i}@example.com today" for i in range(40)], make_tokenizer()
    folder = make_set([json.dumps({"text": row}) for row in rows])
    built = build_calibration(folder, model, Budget(4, 100))
    text = text_of(built.token_ids, model)
    assert "example.com" not in text
    assert "<EMAIL_" in text
    assert built.account[0].redacted == {"email": 40}
    plain = build_calibration(with_keys(folder, "redact: off"), model, Budget(4, 100))
    assert "@example.com" in text_of(plain.token_ids, model)


def test_copies_across_sources_and_near_duplicates_are_dropped(make_set: Make, make_tokenizer: Make) -> None:
    rng, model = random.Random(0), make_tokenizer()
    texts = [" ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(20)) for _ in range(20)]
    near = [f"{text} again" for text in texts[:5]]
    folder = make_set([json.dumps({"text": text}) for text in (*texts, *near)])
    copies = [json.dumps({"text": text.upper()}) for text in texts[:7]]
    (folder / "more.jsonl").write_text("\n".join((*copies, json.dumps({"text": "of its own " * 9}))))
    with (folder / "set.yaml").open("a") as definition:
        definition.write("  - {path: more.jsonl}\n")
    built = build_calibration(folder, model, Budget(20, 100))
    dropped = [account.dropped for account in built.account]
    assert sum(each.get("exact duplicate", 0) for each in dropped) == 7
    assert sum(each.get("near duplicate", 0) for each in dropped) == 5
    assert sum(account.num_samples_available for account in built.account) == 21


def test_a_row_that_copies_another_is_kept_where_only_equal_ones_count(make_set: Make, make_tokenizer: Make) -> None:
    rows = [
        json.dumps({"text": f"the quick brown fox jumps over one lazy dog near a river bank while it rains {i}"})
        for i in range(40)
    ]
    folder, model = make_set(rows), make_tokenizer()
    assert build_calibration(with_keys(folder, "near_duplicates: off"), model, Budget(4, 100)).token_ids.size == 400
    with pytest.raises(DataError, match="after dropping rows: 39 near duplicate"):
        build_calibration(make_set(rows), model, Budget(4, 100))


def test_separate_documents_have_positions_of_their_own(make_set: Make, make_tokenizer: Make) -> None:
    folder, model = make_set(text_rows(40, 19)), make_tokenizer()
    joined = build_calibration(folder, model, Budget(4, 50))
    apart = build_calibration(with_keys(folder, "packing: separate"), model, Budget(4, 50))
    assert joined.position_ids is None
    assert apart.position_ids is not None
    assert apart.token_ids.tolist() == joined.token_ids.tolist()
    assert apart.digest != joined.digest
    assert apart.position_ids[0, 18:22].tolist() == [18, 19, 0, 1]
    assert apart.position_ids[1, 0] == 0
    assert sum(document.num_tokens_used for document in apart.documents) == 200


def test_truncated_sequences_are_the_beginnings_of_rows(make_set: Make, make_tokenizer: Make) -> None:
    rng = random.Random(0)
    rows = ["".join(rng.choices("abcdefghijklmnop", k=length)) for length in [20] * 30 + [80] * 12]
    folder, model = make_set([json.dumps({"text": row}) for row in rows]), make_tokenizer()
    built = build_calibration(with_keys(folder, "packing: truncate"), model, Budget(10, 40))
    assert built.token_ids.shape == (10, 40)
    assert len(built.documents) == built.account[0].num_samples_truncated == 10
    assert built.account[0].dropped == {"shorter than a sequence": 30}
    beginnings = {row[:40] for row in rows}
    assert all(text_of(sequence, model) in beginnings for sequence in built.token_ids)
    with pytest.raises(DataError, match=r"asked for 20 rows of 40 tokens or more; the set has 12 after dropping rows"):
        build_calibration(folder, model, Budget(20, 40))


def test_bad_rows_can_be_dropped_and_are_counted(make_set: Make, make_tokenizer: Make) -> None:
    folder = make_set([*text_rows(40, 19), '{"text": 5}', '{"text": ""}', b'{"text": "\xff"}'])
    model = make_tokenizer()
    built = build_calibration(with_keys(folder, "bad_rows: drop"), model, Budget(10, 32))
    assert built.account[0].dropped == {"field is empty": 1, "field is not text": 1, "not UTF-8": 1}
    assert built.manifest["account"][0]["dropped"] == built.account[0].dropped
    assert built.notes == ()


def test_a_source_with_many_bad_rows_gets_a_note(make_set: Make, make_tokenizer: Make) -> None:
    folder = with_keys(make_set([*text_rows(40, 19), *['{"body": "x"}'] * 3, *['{"text": 5}'] * 2]), "bad_rows: drop")
    built = build_calibration(folder, make_tokenizer(), Budget(10, 32))
    assert built.notes == (
        "calibration: rows.jsonl: 5 of 45 rows are dropped as bad (2 field is not text, 3 no field); correct the file, "
        "or what the set says of it",
    )


def test_the_manifest_names_the_chat_template_that_was_used(make_set: Make, make_tokenizer: Make) -> None:
    rows = [json.dumps({"m": [{"role": "user", "content": f"hello {i}"}]}) for i in range(40)]
    folder = make_set(rows, "fields: {messages: m}")
    template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    built = build_calibration(folder, make_tokenizer(template=template), Budget(4, 32))
    [source] = built.manifest["sources"]
    assert source["template"] == "tokenizer"
    assert source["template_sha256"] == hashlib.sha256(template.encode()).hexdigest()


def test_a_single_sample_is_noted_in_the_singular(make_set: Make, make_tokenizer: Make) -> None:
    built = build_calibration(make_set(text_rows(1, 99)), make_tokenizer(), Budget(1, 100))
    assert built.notes == ("calibration: only 1 sample; statistics will follow this one text",)


def test_filters_that_leave_nothing_are_refused_with_counts(make_set: Make, make_tokenizer: Make) -> None:
    folder = make_set(text_rows(40, 19), "filter: {min_chars: 50}")
    with pytest.raises(DataError, match=r"rows.jsonl: no row is left of 40 \(40 filtered\); fill or remove it"):
        build_calibration(folder, make_tokenizer(), Budget(1, 8))


def test_held_out_groups_give_nothing(make_set: Make, make_tokenizer: Make) -> None:
    rows = [json.loads(row) | {"who": f"c{i % 10}"} for i, row in enumerate(text_rows(200, 19))]
    folder = make_set([json.dumps(row) for row in rows], "group: who\n    max_group_frac: 0.5")
    built = build_calibration(with_keys(folder, "holdout: {frac: 0.3}"), make_tokenizer(), Budget(2, 32))
    used = {rows[int(document.where.split(":")[1]) - 1]["who"] for document in built.documents}
    held_out = {f"c{i}" for i in range(10) if is_held_out(holdout_key(f"c{i}", ""), "", 0.3)}
    assert 0 < len(held_out) < 10
    assert not used & held_out
    assert built.account[0].dropped["held out"] == 20 * len(held_out)


def test_rows_like_what_is_evaluated_are_refused_or_dropped(make_set: Make, make_tokenizer: Make) -> None:
    folder, model = make_set(text_rows(40, 19)), make_tokenizer()
    texts = [EvalText("suite", str(i), json.loads(row)["text"]) for i, row in enumerate(text_rows(3, 19))]
    with pytest.raises(DataError, match=r"calibration set tiny: 3 rows overlap suite \(3 exact\): .*rows.jsonl:1 = 0"):
        build_calibration(folder, model, Budget(10, 32), context=BuildContext(eval_texts=texts))
    built = build_calibration(folder, model, Budget(10, 32), context=BuildContext(eval_texts=texts, on_leakage="drop"))
    assert built.account[0].dropped == {"leaked": 3}
    assert built.account[0].num_samples_available == 37
