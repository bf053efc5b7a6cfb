import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantpipe.calibration.text.language import MAX_CHARS, detect
from quantpipe.errors import DataError

SENTENCES = {
    "en": "I lost my card yesterday and need a new one as soon as possible.",
    "de": "Ich habe gestern meine Karte verloren und brauche so schnell wie möglich eine neue.",
    "fr": "J'ai perdu ma carte hier et il m'en faut une nouvelle le plus vite possible.",
    "zh": "我昨天把银行卡弄丢了，请尽快帮我补办一张新的。",
    "ja": "昨日カードをなくしてしまったので、できるだけ早く新しいものが必要です。",
}


@pytest.mark.parametrize(("language", "text"), SENTENCES.items())
def test_a_sentence_is_told_among_five_languages(language: str, text: str) -> None:
    assert detect(text, list(SENTENCES)) == language


def test_code_is_given_back_as_it_was_written() -> None:
    assert detect(SENTENCES["zh"], ["en-GB", "zh_CN"]) == "zh_CN"
    assert detect(SENTENCES["en"], ["en-GB", "zh_CN"]) == "en-GB"


@pytest.mark.parametrize("text", ["", "ok", "12345 67890 12345", "你好", "!!! ??? ...", "Thanks"])
def test_too_short_a_text_is_of_unknown_language(text: str) -> None:
    assert detect(text, ["en", "zh"]) == "und"


def test_order_of_the_languages_does_not_count() -> None:
    assert all(detect(text, list(SENTENCES)[::-1]) == language for language, text in SENTENCES.items())


def test_only_the_beginning_of_a_long_text_is_looked_at() -> None:
    beginning = (SENTENCES["en"] + " ") * (MAX_CHARS // len(SENTENCES["en"]) + 1)
    assert detect(beginning + SENTENCES["zh"] * 1000, ["en", "zh"]) == "en"


@given(st.text(max_size=200))
def test_answer_is_one_of_those_given_or_unknown(text: str) -> None:
    assert detect(text, ["en", "zh"]) in ("en", "zh", "und")


def test_language_that_cannot_be_told_is_refused() -> None:
    with pytest.raises(DataError, match="cannot tell 'klingon'"):
        detect("whatever", ["en", "klingon"])


def test_no_languages_given_are_refused() -> None:
    with pytest.raises(DataError, match="list them under `languages`"):
        detect("whatever", [])
