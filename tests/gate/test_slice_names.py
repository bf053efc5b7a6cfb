from hypothesis import given
from hypothesis import strategies as st

from quantpipe.gate.slice_names import sliced_name, split_name

KEYS = st.sampled_from(["domain", "language", "product-line"])


def test_names_say_metric_and_fields_in_order() -> None:
    assert sliced_name("mean_kl", {}) == "mean_kl"
    assert sliced_name("mean_kl", {"domain": "chinese"}) == "mean_kl[domain=chinese]"
    assert sliced_name("mean_kl", {"language": "zh", "domain": "two words"}) == "mean_kl[domain=two words,language=zh]"
    assert sliced_name("mean_kl", {"domain": "a,b=]"}) == 'mean_kl[domain="a,b=]"]'


@given(st.dictionaries(KEYS, st.text(), max_size=3))
def test_every_name_is_read_back(fields: dict[str, str]) -> None:
    assert split_name(sliced_name("p99_kl", fields)) == ("p99_kl", fields)


def test_what_the_rule_does_not_write_is_no_name() -> None:
    for wrong in ("mean_kl[", "mean_kl[]", "mean_kl[domain]", "mean_kl[domain=a", "mean_kl[language=a,domain=b]"):
        assert split_name(wrong) is None
    for wrong in ('mean_kl[domain="a"]', 'mean_kl[domain="\\x"]', "mean_kl[domain=a,domain=b]", "mean_kl[domain=a ]"):
        assert split_name(wrong) is None
