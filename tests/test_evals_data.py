"""The shipped evals: enough items, all different, spread over domains, few of them alike, and text to spare."""

from collections import Counter
from pathlib import Path

import pytest

from quantpipe.evaluate.suite import load_suite
from quantpipe.evaluate.tasks import EvalTask

EVALS = Path(__file__).parents[1] / "evals"
DOMAINS = {"general", "code", "customer_service", "chinese"}


@pytest.fixture(scope="module")
def tasks() -> dict[str, EvalTask]:
    return {task.name: task for task in load_suite(EVALS / "quickstart").tasks}


@pytest.mark.parametrize("suite_file", sorted(EVALS.glob("*/suite.yaml")), ids=lambda file: file.parent.name)
def test_every_shipped_suite_loads_and_has_a_card(suite_file: Path) -> None:
    assert load_suite(suite_file.parent).num_items >= 100
    assert "Apache-2.0" in (suite_file.parent / "README.md").read_text()


def test_quickstart_has_enough_items_in_every_domain(tasks: dict[str, EvalTask]) -> None:
    assert len(tasks["quickstart_choice"].docs) >= 288
    assert len(tasks["quickstart_short_answer"].docs) >= 64
    for task in tasks.values():
        counts = Counter(doc["domain"] for doc in task.docs)
        assert set(counts) == DOMAINS
        assert min(counts.values()) >= 10


def test_no_two_items_ask_the_same(tasks: dict[str, EvalTask]) -> None:
    choice = [doc["prompt"].lower() for doc in tasks["quickstart_choice"].docs]
    short = [doc["question"].lower() for doc in tasks["quickstart_short_answer"].docs]
    assert [text for text, count in Counter(choice + short).items() if count > 1] == []


def test_most_clusters_are_single_items(tasks: dict[str, EvalTask]) -> None:
    """An interval counts clusters, so items that share a template are few."""
    sizes = Counter(doc["cluster"] for task in tasks.values() for doc in task.docs)
    num_items = sum(sizes.values())
    assert sum(size for size in sizes.values() if size == 1) >= 0.75 * num_items
    assert max(sizes.values()) <= 4


def test_choices_are_four_of_similar_length_and_the_right_one_is_anywhere(tasks: dict[str, EvalTask]) -> None:
    """Scored by plain log-likelihood, so no choice may win by being short."""
    docs = tasks["quickstart_choice"].docs
    for doc in docs:
        lengths = [len(choice.strip()) for choice in doc["choices"]]
        assert len(set(doc["choices"])) == 4, doc["id"]
        assert max(lengths) <= 2 * min(lengths) + 4, doc["id"]
        assert len({choice[:1].isspace() for choice in doc["choices"]}) == 1, doc["id"]
    positions = Counter(doc["label"] for doc in docs)
    assert max(positions.values()) - min(positions.values()) <= 1


def test_accepted_answers_are_short_and_different(tasks: dict[str, EvalTask]) -> None:
    for doc in tasks["quickstart_short_answer"].docs:
        assert 1 <= len(doc["answers"]) == len(set(doc["answers"])), doc["id"]
        assert all(0 < len(answer.split()) <= 6 for answer in doc["answers"]), doc["id"]


def test_held_out_text_covers_prose_manuals_code_support_and_chinese() -> None:
    texts = {file.name: file.read_text(encoding="utf-8") for file in (EVALS / "quickstart" / "held_out").glob("*.txt")}
    kinds = Counter(name.split("_")[0] for name in texts)
    assert set(kinds) == {"prose", "manual", "python", "support", "zh"}
    assert len(" ".join(texts.values()).split()) >= 5000
    paragraphs = [p for text in texts.values() for p in text.split("\n\n") if len(p) > 40]
    assert len(set(paragraphs)) == len(paragraphs)
    for name, text in texts.items():
        if name.startswith("python_"):
            compile(text, name, "exec")


def test_held_out_text_and_items_share_no_question(tasks: dict[str, EvalTask]) -> None:
    text = " ".join(f.read_text(encoding="utf-8") for f in (EVALS / "quickstart" / "held_out").glob("*.txt"))
    asked = [doc["prompt"] for doc in tasks["quickstart_choice"].docs if len(doc["prompt"]) > 25]
    assert [prompt for prompt in asked if prompt in text] == []


def test_the_example_of_the_short_form_works_as_it_is(tiny_llama: Path) -> None:
    from quantpipe.evaluate.suite import check_suite
    from quantpipe.evaluate.suite_file import read_suite_file

    suite = load_suite(EVALS / "support.yaml")
    check_suite(suite, tiny_llama)
    assert {task.name: task.num_items for task in suite.tasks} == {
        "support-intent": 28,
        "support-order-number": 12,
        "support-order-json": 12,
        "support-amount": 10,
        "support-mentions": 12,
    }
    kinds = {entry.kind for entry in read_suite_file(EVALS / "support.yaml").entries}  # type: ignore[union-attr]
    assert kinds == {"choice", "regex", "json_schema", "numeric", "contains"}
    assert "Apache-2.0" in (EVALS / "support" / "README.md").read_text()


def test_the_example_runs_on_a_model(tiny_llama: Path) -> None:
    from quantpipe.engine.config import EngineConfig
    from quantpipe.engine.engine import Engine
    from quantpipe.engine.tokenizer import Tokenizer
    from quantpipe.evaluate.comparison import compare
    from quantpipe.evaluate.suite import run_suite

    engine = Engine.open(tiny_llama, EngineConfig(backend="cpu", num_threads=1))
    tokenizer, suite = Tokenizer.open(tiny_llama), load_suite(EVALS / "support.yaml")
    results = [run_suite(engine, tokenizer, suite) for _ in range(2)]
    assert compare(*results).loss().value == 0.0
    assert len(results[0].items) == suite.num_items
    assert all(0 <= item.score <= 1 for item in results[0].items)
    assert {item.slices["language"] for item in results[0].items if item.slices} == {"en", "de", "zh"}
