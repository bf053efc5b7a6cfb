import json
from dataclasses import replace

import numpy as np
import pytest

from quantpipe.calibration.calibration_set import CalibrationSet, Document
from quantpipe.calibration.views.coverage import MOST_SHOWN, Coverage, Share, measure_coverage, render_text


def document(domain: str, language: str, num_tokens: int, num_used: int | None = None) -> Document:
    return Document(
        "rows.csv:2", "rows.csv", domain, language, num_tokens, num_tokens if num_used is None else num_used
    )


DOCUMENTS = (document("cards", "en", 30), document("loans", "zh", 40), document("cards", "zh", 200, 58))


def built(documents: tuple[Document, ...] = DOCUMENTS, token_ids: list[int] | None = None) -> CalibrationSet:
    ids = np.arange(128) % 10 if token_ids is None else np.array(token_ids)
    return CalibrationSet("tickets", ids.reshape(2, -1), 2, (), "0" * 64, documents=documents)


def covered(held_out: dict[str, list[list[int]]] | None = None) -> Coverage:
    return measure_coverage(built(), 20, held_out or {})


def test_tokens_are_counted_by_domain_language_and_length() -> None:
    coverage = covered()
    assert coverage.domains == (Share("cards", 2, 88), Share("loans", 1, 40))
    assert coverage.languages == (Share("zh", 2, 98), Share("en", 1, 30))
    assert coverage.lengths == (Share("1 to 32", 1, 30), Share("33 to 64", 1, 40), Share("129 to 256", 1, 58))
    for shares in (coverage.domains, coverage.languages, coverage.lengths):
        assert sum(share.num_tokens for share in shares) == coverage.num_tokens == 128


@pytest.mark.parametrize(
    ("length", "name"),
    [
        (1, "1 to 32"),
        (32, "1 to 32"),
        (33, "33 to 64"),
        (4096, "2049 to 4096"),
        (4097, "over 4096"),
        (10**9, "over 4096"),
    ],
)
def test_every_length_is_in_one_bin(length: int, name: str) -> None:
    coverage = measure_coverage(built((document("a", "en", length),)), 20, {})
    assert [share.name for share in coverage.lengths] == [name]


def test_lengths_are_in_order_of_length_whatever_their_share() -> None:
    documents = tuple(document("a", "en", length) for length in (5000, 3000, 40, 5, 100))
    names = [share.name for share in measure_coverage(built(documents), 20, {}).lengths]
    assert names == ["1 to 32", "33 to 64", "65 to 128", "2049 to 4096", "over 4096"]


def test_what_was_cut_off_is_counted() -> None:
    coverage = covered()
    assert (coverage.num_truncated, coverage.num_tokens_cut, coverage.num_documents) == (1, 142, 3)
    assert "truncated: 1 of 3 documents, of which 142 tokens are not used" in render_text(coverage)


def test_vocabulary_counts_ids_of_the_set_and_of_held_out_text() -> None:
    coverage = covered({"cards": [[1, 2, 3, 11], [1, 1, 12, 11]], "loans": [[4, 5]]})
    assert (coverage.num_ids, coverage.vocabulary_size) == (10, 20)
    cards, loans = coverage.held_out
    assert (cards.name, cards.num_tokens, cards.num_tokens_seen, cards.num_ids, cards.num_ids_seen) == (
        "cards", 8, 5, 5, 3,
    )  # fmt: skip
    assert loans.num_tokens == loans.num_tokens_seen == 2
    text = render_text(coverage)
    assert "vocabulary: 10 of 20 ids occur (50.0%)" in text
    assert "held-out cards: 62.5% of its 8 tokens have an id that was calibrated on (3 of 5 different ids)" in text


def test_a_domain_without_held_out_tokens_is_no_division_by_zero() -> None:
    assert "0.0% of its 0 tokens" in render_text(covered({"empty": []}))


def test_json_holds_everything_and_is_stable() -> None:
    coverage = covered({"cards": [[1, 11]]})
    stored = json.dumps(coverage.to_json(), allow_nan=False)
    assert stored == json.dumps(covered({"cards": [[1, 11]]}).to_json())
    assert json.loads(stored)["domains"][0] == {"name": "cards", "num_documents": 2, "num_tokens": 88}
    assert json.loads(stored)["vocabulary_frac"] == 0.5


def test_documents_without_a_domain_count_for_their_source() -> None:
    documents = tuple(replace(each, domain="") for each in DOCUMENTS)
    assert measure_coverage(built(documents), 20, {}).domains == (Share("rows.csv", 3, 128),)


def test_unknown_languages_are_said_to_be_unknown() -> None:
    documents = tuple(replace(each, language="und") for each in DOCUMENTS)
    assert "language: not known; give the sources a language" in render_text(measure_coverage(built(documents), 20, {}))


def test_many_domains_are_summed_up_and_their_shares_still_make_a_whole() -> None:
    documents = tuple(document(f"topic {i}", "en", 10) for i in range(MOST_SHOWN + 5))
    lines = render_text(measure_coverage(built(documents), 20, {})).splitlines()
    domains = lines[lines.index("domain:") + 1 : lines.index("language:")]
    assert len(domains) == MOST_SHOWN + 1
    assert domains[-1].split() == ["5", "more", "50", "tokens", "20.0%", "5", "documents"]
