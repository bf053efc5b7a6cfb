import json
from pathlib import Path

from quantpipe.evaluate.divergence import measure_against, measure_divergence
from quantpipe.evaluate.fidelity.record import write_divergence_json
from quantpipe.evaluate.fidelity.reference import make_reference
from quantpipe.gate.record import DIVERGENCE_NAME
from tests.evaluate.conftest import BigramEngine, random_table

WINDOWS = [[1, 2, 3, 4], [5, 6, 7, 8], [2, 4, 6, 8]]
SLICES = [{"domain": "law"}, {"domain": "law"}, {"domain": "chat"}]


def test_the_record_says_what_was_measured_against_what(tmp_path: Path) -> None:
    base, cand = BigramEngine(random_table(1)), BigramEngine(random_table(2))
    path = tmp_path / DIVERGENCE_NAME
    write_divergence_json(path, measure_divergence(base, cand, WINDOWS, slices=SLICES), "digest")
    record = json.loads(path.read_text())
    assert (record["baseline"], record["top_k"], record["artifact_digest"]) == ("run", None, "digest")
    assert [window["fields"] for window in record["windows"]] == SLICES
    slices = [(each["value"], each["num_windows"]) for each in record["slices"]]
    assert slices == [("chat", 1), ("law", 2)]
    alone = next(each for each in record["measurements"] if each["name"] == "mean_kl[domain=chat]")
    assert (alone["low"], alone["high"]) == (None, None)
    write_divergence_json(path, measure_against(make_reference(base, WINDOWS, 8), cand, WINDOWS), "digest")
    record = json.loads(path.read_text())
    assert (record["baseline"], record["top_k"]) == ("stored", 8)
    assert "mean_kl_topk" in {each["name"] for each in record["measurements"]}
