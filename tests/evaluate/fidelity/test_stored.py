from pathlib import Path

from quantpipe.evaluate.fidelity.stored import reference_path, stored_reference
from quantpipe.report import Reporter
from tests.evaluate.conftest import BigramEngine, random_table

WINDOWS = [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_a_baseline_is_run_once_for_what_it_is_made_from(tmp_path: Path, quiet: Reporter) -> None:
    engine = BigramEngine(random_table(1))
    first = stored_reference(engine, ["digest", {"backend": "cpu"}], WINDOWS, tmp_path, quiet, 8)
    again = stored_reference(engine, ["digest", {"backend": "cpu"}], WINDOWS, tmp_path, quiet, 8)
    assert len(engine.calls) == 2  # one for each window
    assert (first.logprobs_WTK == again.logprobs_WTK).all()
    stored_reference(engine, ["other", {"backend": "cpu"}], WINDOWS, tmp_path, quiet, 8)
    assert len(engine.calls) == 4


def test_anything_that_changes_numbers_has_a_file_of_its_own(tmp_path: Path) -> None:
    made_from = ["digest", {"backend": "cpu"}]
    paths = {
        reference_path(made_from, WINDOWS, tmp_path, 8),
        reference_path(made_from, WINDOWS, tmp_path, 16),
        reference_path(made_from, WINDOWS[::-1], tmp_path, 8),
        reference_path(["digest", {"backend": "reference"}], WINDOWS, tmp_path, 8),
    }
    assert len(paths) == 4
