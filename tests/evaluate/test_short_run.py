"""Tasks of the short form on models with known answers: prompts, chat, digests, margins, scores."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import DataError
from quantpipe.evaluate.asking import Asker
from quantpipe.evaluate.comparison import compare
from quantpipe.evaluate.items import SuiteResult
from quantpipe.evaluate.short_run import prompt_text
from quantpipe.evaluate.short_task import ShortTask
from quantpipe.evaluate.suite import check_suite, load_suite, run_suite
from tests.evaluate.conftest import BigramEngine, CharCodec, random_table, speaking_table
from tests.evaluate.test_short_task import TASK, write_suite

ROWS = "id,q,target,lang\n1,a,bc,en\n2,aa,xy,de\n3,a,bc,en\n"
CHOICE: dict[str, Any] = {
    "name": "letters",
    "kind": "choice",
    "file": "intents.csv",
    "prompt": "{{ q }}",
    "choices": ["bc", "xy"],
    "answer_prefix": "",
    "slices": ["lang"],
}
EXACT = {"name": "says", "kind": "exact", "file": "intents.csv", "prompt": "{{ q }}", "max_tokens": 8}


def knowing_engine() -> BigramEngine:
    """Says "bc" after "a"."""
    return BigramEngine(speaking_table("abc\n"))


def run(folder: Path, codec: Any, *tasks: dict[str, Any], engine: Any = None) -> SuiteResult:
    return run_suite(engine or knowing_engine(), codec, load_suite(write_suite(folder, *tasks, rows=ROWS)))


def test_choices_and_answers_are_scored_with_all_that_is_known_of_an_item(tmp_path: Path, codec: CharCodec) -> None:
    result = run(tmp_path, codec, CHOICE, EXACT)
    assert [(i.task, i.doc_id, i.score, i.prediction) for i in result.items] == [
        ("letters", "1", 1.0, "bc"),
        ("letters", "2", 0.0, "bc"),
        ("letters", "3", 1.0, "bc"),
        ("says", "1", 1.0, "bc"),
        ("says", "2", 0.0, "bc"),
        ("says", "3", 1.0, "bc"),
    ]
    choice, answer = result.items[0], result.items[3]
    assert isinstance(choice.response, tuple) and choice.margin == pytest.approx(
        choice.response[0] - choice.response[1]
    )
    assert (answer.response, answer.margin) == ("bc", None)
    assert (choice.slices, choice.cluster, choice.domain) == ({"lang": "en"}, "1", "letters")
    assert choice.prompt_digest != answer.prompt_digest


def test_a_model_against_itself_pairs_and_other_tokens_are_refused(tmp_path: Path, codec: CharCodec) -> None:
    class Shifted(CharCodec):
        def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
            return [1, *super().encode(text)]

    base = run(tmp_path, codec, CHOICE, EXACT)
    assert not compare(base, run(tmp_path, codec, CHOICE, EXACT)).lost
    with pytest.raises(DataError, match="different prompt tokens"):
        compare(base, run(tmp_path, Shifted(), CHOICE, EXACT))


def test_all_choices_of_all_tasks_share_the_engines_calls(tmp_path: Path, codec: CharCodec) -> None:
    engine = knowing_engine()
    run(tmp_path, codec, CHOICE, CHOICE | {"name": "again"}, EXACT, EXACT | {"name": "more"}, engine=engine)
    assert engine.calls == [4, 6]  # two questions that differ, each read up to the last token of two choices


def test_what_stops_an_answer_is_no_part_of_it(tmp_path: Path, codec: CharCodec) -> None:
    assert run(tmp_path, codec, EXACT | {"stop": ["c"]}).items[0].response == "b"
    assert run(tmp_path, codec, EXACT | {"stop": [], "max_tokens": 1}).items[0].response == "b"


def test_examples_come_before_the_question(tmp_path: Path) -> None:
    [task] = load_suite(write_suite(tmp_path, TASK | {"few_shot": {"num": 1, "seed": 1, "separator": "\n--\n"}})).tasks
    assert isinstance(task, ShortTask)
    shot, item = task.shots[0], task.items[0]
    assert prompt_text(task, item, None) == f"{shot.prompt} {shot.answer}\n--\n{item.prompt}"


def test_the_models_chat_template_frames_system_examples_and_question(tmp_path: Path, tiny_llama: Path) -> None:
    keys = TASK | {"chat": True, "system": "Sort mail.", "few_shot": {"num": 1, "seed": 1}}
    suite = load_suite(write_suite(tmp_path, keys))
    tokenizer = Tokenizer.open(tiny_llama)
    check_suite(suite, tiny_llama)
    engine = Engine.open(tiny_llama, EngineConfig(backend="reference", num_threads=1, max_num_seqs=4))
    result = run_suite(engine, tokenizer, suite)
    assert {item.prediction for item in result.items} <= {"billing", "delivery", "other"}
    plain = run_suite(engine, tokenizer, load_suite(write_suite(tmp_path, TASK)))
    assert not {item.prompt_digest for item in plain.items} & {item.prompt_digest for item in result.items}


def test_chat_without_a_template_is_refused_before_the_run(tmp_path: Path, tiny_llama: Path, codec: CharCodec) -> None:
    suite = load_suite(write_suite(tmp_path, TASK | {"chat": True}))
    plain = tmp_path / "plain"
    plain.mkdir()
    shutil.copy(tiny_llama / "tokenizer.json", plain)
    with pytest.raises(DataError, match=r"support\.yaml:\d+:9: tasks\[0\]\.chat: .* has no chat template"):
        check_suite(suite, plain)
    with pytest.raises(DataError, match="has no chat template"):
        run_suite(knowing_engine(), codec, suite)


def test_a_pair_is_parted_where_the_context_alone_would_end(codec: CharCodec) -> None:
    asker = Asker(BigramEngine(random_table(0)), codec)
    assert asker.encode_pair("ab ", "c") == (codec.encode("ab"), codec.encode(" c"))
    assert asker.encode_pair("", "c") == ([1], codec.encode("c"))


def test_a_prompt_that_is_too_long_for_the_engine_is_refused(tmp_path: Path, codec: CharCodec) -> None:
    with pytest.raises(DataError, match="exceed max_model_len 64"):
        run(tmp_path, codec, EXACT | {"prompt": "{{ q }}" + "x" * 60})


def test_generated_code_is_run(tmp_path: Path, codec: CharCodec) -> None:
    rows = "id,q,tests\n1,a,assert bc\n2,a,assert not bc\n"
    keys = {"name": "code", "kind": "code", "file": "intents.csv", "prompt": "{{ q }}", "max_tokens": 8}
    suite = load_suite(write_suite(tmp_path, keys, rows=rows))
    items = run_suite(BigramEngine(speaking_table("abc=1\n")), codec, suite).items
    assert [(item.score, item.prediction) for item in items] == [(1.0, "passed"), (0.0, "AssertionError")]
