import numpy as np

from quantpipe.evaluate.divergence import measure_against, measure_divergence
from quantpipe.evaluate.fidelity.facts import divergence_facts
from quantpipe.evaluate.fidelity.reference import make_reference
from tests.evaluate.conftest import VOCAB_SIZE, BigramEngine, random_table

WINDOWS = np.random.default_rng(9).integers(0, VOCAB_SIZE, size=(4, 80)).tolist()
BASE, CAND = BigramEngine(random_table(1)), BigramEngine(random_table(2))


def test_facts_name_the_worst_domain_and_show_kl_by_position() -> None:
    slices = [{"domain": name} for name in ("law", "chat", "law", "chat")]
    facts = dict(divergence_facts(measure_divergence(BASE, CAND, WINDOWS, slices=slices)))
    assert list(facts) == [
        "perplexity", "KL per token, nats", "worst domain", "mean KL by tokens before", "KL by length of text"
    ]  # fmt: skip
    assert "of 2 domains" in facts["worst domain"]
    assert facts["mean KL by tokens before"].startswith("1-15: ")
    assert "64-79: " in facts["mean KL by tokens before"]
    assert "nats for each doubling of the text before" in facts["KL by length of text"]


def test_a_stored_baseline_is_said_to_give_a_lower_bound() -> None:
    found = measure_against(make_reference(BASE, WINDOWS, 8), CAND, WINDOWS)
    assert dict(divergence_facts(found))["baseline"] == "stored, 8 tokens of each position: every KL is a lower bound"
