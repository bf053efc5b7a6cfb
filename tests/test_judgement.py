import dataclasses
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from quantpipe.calibration.held_out.held_out_windows import SEVERAL
from quantpipe.engine.admission import ADMISSIONS
from quantpipe.engine.batching import BATCHING_MODES
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.policies import POLICIES
from quantpipe.engine.speculative.drafter import DRAFTERS, NO_DRAFTER
from quantpipe.errors import DataError
from quantpipe.judgement import engine_config, read_compared, read_questions, read_texts
from quantpipe.recipe.engine_section import SET_ELSEWHERE, EngineSection
from quantpipe.recipe.schema import Recipe

EVALS = Path(__file__).parents[1] / "evals" / "quickstart"


def recipe(tmp_path: Path, **sections: object) -> Recipe:
    plain = {"version": 1, "name": "x", "model": {"source": "m"}, "gate": {"mean_kl": {"max": 1.0}}, "output": tmp_path}
    return Recipe.model_validate(plain | sections)


def test_every_engine_setting_of_a_recipe_reaches_the_engine(tmp_path: Path) -> None:
    section = {
        "backend": "reference",
        "max_model_len": 99,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 77,
        "block_size": 8,
        "num_kv_blocks": None,
        "kv_cache_memory": 12_345_678,
        "memory_utilization": None,
        "prefix_cache": False,
        "policy": "deadline",
        "admission": "reserve",
        "batching": "static",
        "static_wait_s": 0.5,
        "max_prefill_chunk": 33,
        "max_long_prefills": 2,
        "long_prompt_tokens": 500,
        "target_step_s": 0.25,
        "speculative": "ngram",
        "num_draft_tokens": 7,
        "window_tokens": 64,
        "sink_tokens": 5,
        "activations": "int8",
        "cuda_graphs": False,
        "num_threads": 2,
    }
    assert set(section) == set(EngineSection.model_fields)
    config = engine_config(recipe(tmp_path, engine=section))
    assert {name: getattr(config, name) for name in section} == section
    assert config.kv_dtype is None  # the manifest decides
    for name, value in {"memory_utilization": 0.25, "num_kv_blocks": 99}.items():
        assert getattr(engine_config(recipe(tmp_path, engine={name: value})), name) == value


def test_every_setting_of_the_engine_is_a_key_of_recipes_or_set_elsewhere_for_a_reason() -> None:
    keys, settings = set(EngineSection.model_fields), {field.name for field in dataclasses.fields(EngineConfig)}
    assert keys | set(SET_ELSEWHERE) == settings
    assert not keys & set(SET_ELSEWHERE)
    assert all(SET_ELSEWHERE.values())
    defaults = EngineConfig()
    assert {name: getattr(EngineSection(), name) for name in keys} == {name: getattr(defaults, name) for name in keys}


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("policy", POLICIES),
        ("admission", ADMISSIONS),
        ("batching", BATCHING_MODES),
        ("speculative", (NO_DRAFTER, *DRAFTERS)),
    ],
)
def test_recipes_and_the_engine_know_the_same_names(key: str, known: Collection[str]) -> None:
    assert set(get_args(EngineSection.model_fields[key].annotation)) == set(known)


def test_questions_are_read_before_any_work(tmp_path: Path, tiny_llama: Path) -> None:
    divergence = {"text": EVALS / "held_out", "num_windows": 4, "window_tokens": 32}
    asked = recipe(tmp_path, evaluate={"suite": EVALS, "divergence": divergence})
    questions = read_questions(asked, tiny_llama)
    assert questions.suite is not None
    assert questions.suite.num_items >= 180
    assert [len(window) for window in questions.windows] == [32] * 4
    files = sorted(path.stem for path in (EVALS / "held_out").glob("*.txt"))
    assert questions.by_domain() == dict(zip(files[:4], [[window] for window in questions.windows], strict=True))


def test_windows_have_the_domain_of_their_file_and_the_fields_given_to_it(tmp_path: Path, tiny_llama: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for name in ("letters_a", "letters_b", "mail"):
        (text / f"{name}.txt").write_text("words enough for a window of these, " * 20)
    patterns = {"letters_*": {"domain": "letters", "language": "de"}, "*_b": {"language": "fr"}}
    divergence = {"text": text, "num_windows": 3, "window_tokens": 32, "slices": patterns}
    sections = {"evaluate": {"suite": EVALS, "divergence": divergence}}
    questions = read_questions(recipe(tmp_path, **sections), tiny_llama)
    assert questions.domains == ("letters_a", "letters_b", "mail")
    assert questions.slices(patterns) == (
        {"domain": "letters", "language": "de"},
        {"domain": "letters", "language": "fr"},
        {"domain": "mail"},
    )
    assert replace(questions, domains=(SEVERAL, "mail", "mail")).slices({}) == (
        {},
        {"domain": "mail"},
        {"domain": "mail"},
    )
    divergence["slices"] = {"mall": {"language": "de"}}
    with pytest.raises(DataError, match=r"slices: no text is called 'mall'; did you mean 'mail'\?"):
        read_questions(recipe(tmp_path, **sections), tiny_llama)


def test_what_sets_are_compared_with_needs_no_windows_of_a_text(tmp_path: Path, tiny_llama: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("far too few words to be cut into windows of many tokens each")
    sections = {"evaluate": {"suite": EVALS, "divergence": {"text": text}}, "calibration": {"set": tmp_path}}
    compared = read_compared(recipe(tmp_path, **sections), tiny_llama)
    assert (compared.windows, compared.by_domain()) == ((), {})
    assert str(text) in {each.set for each in compared.texts}


def test_too_little_held_out_text_is_an_error_with_counts(tmp_path: Path, tiny_llama: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("a few words only")
    asked = recipe(tmp_path, evaluate={"suite": EVALS, "divergence": {"text": text}})
    with pytest.raises(DataError, match="16 are needed"):
        read_questions(asked, tiny_llama)


def test_questions_come_with_the_texts_that_no_calibration_row_may_overlap(tmp_path: Path, tiny_llama: Path) -> None:
    divergence = {"text": EVALS / "held_out", "num_windows": 4, "window_tokens": 32}
    sections = {"evaluate": {"suite": EVALS, "divergence": divergence}, "calibration": {"set": tmp_path}}
    calibrated = recipe(tmp_path, **sections)
    questions = read_questions(calibrated, tiny_llama)
    assert {text.set for text in questions.texts} == {str(EVALS), str(EVALS / "held_out")}
    assert read_texts(calibrated, tiny_llama) == questions.texts
    assert read_texts(recipe(tmp_path, evaluate=sections["evaluate"]), tiny_llama) == ()


def calibrated(tmp_path: Path, holdout: str) -> Recipe:
    """A recipe that is evaluated on what its set of 100 short texts holds out."""
    rows = "".join(f"{n}: the {n}th of a hundred rows, each with a number of its own in it\n" for n in range(100))
    (tmp_path / "rows.txt").write_text(rows)
    source = "sources:\n  - {path: rows.txt, text_rows: line}\n"
    (tmp_path / "set.yaml").write_text(f"version: 1\nname: hundred\nnear_duplicates: off\n{holdout}{source}")
    divergence = {"holdout": True, "num_windows": 4, "window_tokens": 32}
    return recipe(tmp_path, calibration={"set": tmp_path}, evaluate={"suite": EVALS, "divergence": divergence})


def test_held_out_rows_of_the_calibration_set_may_be_the_text(tmp_path: Path, tiny_llama: Path) -> None:
    asked = calibrated(tmp_path, "holdout: {frac: 0.3}\n")
    questions = read_questions(asked, tiny_llama)
    assert [len(window) for window in questions.windows] == [32] * 4
    held_out = [text for text in questions.texts if text.is_held_out]
    assert held_out
    assert all("of a hundred rows" in text.text and text.set == "held-out rows of hundred" for text in held_out)
    again = asked.calibration.model_copy(update={"seed": 5}) if asked.calibration is not None else None
    assert read_questions(asked.model_copy(update={"calibration": again}), tiny_llama).windows == questions.windows
    assert questions.notes == ()


def test_a_domain_of_the_held_out_rows_without_a_window_is_noted(tmp_path: Path, tiny_llama: Path) -> None:
    asked = calibrated(tmp_path, "holdout: {frac: 0.3}\n")
    (tmp_path / "few.txt").write_text("".join(f"{n}: the {n}th of a few rows\n" for n in range(12)))
    with (tmp_path / "set.yaml").open("a") as file:
        file.write("  - {path: few.txt, text_rows: line, domain: few}\n")
    [note] = read_questions(asked, tiny_llama).notes
    assert note.startswith("held-out rows: 4 windows, 2 domains: 1 is not measured, few (")


def test_set_that_holds_nothing_out_cannot_be_evaluated_on(tmp_path: Path, tiny_llama: Path) -> None:
    with pytest.raises(DataError, match="nothing is held out to evaluate on; add holdout"):
        read_questions(calibrated(tmp_path, ""), tiny_llama)
