"""Samples as token ids: the template's text, one BOS at most, one EOS at the end."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quantpipe.calibration.rows import RowError, Sample
from quantpipe.calibration.templates.renderer import Renderer
from quantpipe.errors import DataError

Make = Callable[..., Path]
BOS, EOS = 256, 257
NO_BOS = "{% for m in messages %}{{ m['content'] + eos_token + '\n' }}{% endfor %}"
TWO_BOS = "{{ bos_token + bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
REFUSING = (
    "{% if messages|length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}{{ messages[0]['content'] }}"
)
CONVERSATION = Sample("rows.jsonl:1", ({"role": "user", "content": "ab"},))
TEXT = Sample("rows.jsonl:1", "ab\n\n")


def encode(folder: Path, *samples: Sample) -> list[list[int]]:
    renderer = Renderer(folder)
    return [renderer.encode(sample) for sample in samples]


def refusal(folder: Path, sample: Sample) -> tuple[str, str]:
    """What is said of a sample that cannot be rendered, and what it counts as."""
    with pytest.raises(RowError) as caught:
        Renderer(folder).encode(sample)
    return str(caught.value), caught.value.reason


def test_template_that_writes_bos_with_tokenizer_that_adds_it_gives_one(make_tokenizer: Make) -> None:
    [token_ids] = encode(make_tokenizer(adds_bos=True), CONVERSATION)
    assert token_ids[0] == BOS
    assert token_ids.count(BOS) == 1


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", [NO_BOS, TWO_BOS, None])
def test_bos_stands_once_in_front_or_nowhere(make_tokenizer: Make, template: str | None, adds_bos: bool) -> None:
    folder = make_tokenizer(template=template, adds_bos=adds_bos)
    [token_ids] = encode(folder, TEXT if template is None else CONVERSATION)
    expects_bos = adds_bos or template == TWO_BOS
    assert token_ids.count(BOS) == int(expects_bos)
    assert (token_ids[0] == BOS) == expects_bos


def test_template_that_writes_bos_twice_is_counted(make_tokenizer: Make) -> None:
    renderer = Renderer(make_tokenizer(template=TWO_BOS))
    assert renderer.encode(CONVERSATION) == renderer.encode(CONVERSATION)
    assert renderer.num_double_bos == 2


@pytest.mark.parametrize("sample", [CONVERSATION, TEXT])
def test_sample_ends_with_one_eos_and_no_white_space_before_it(make_tokenizer: Make, sample: Sample) -> None:
    [token_ids] = encode(make_tokenizer(), sample)
    assert token_ids.count(EOS) == 1
    assert token_ids[-1] == EOS
    [expected] = encode(make_tokenizer(name="other"), Sample("", "b"))
    assert token_ids[-2:] == expected  # the last letter stands directly before the EOS


def test_text_reads_as_it_was_given(make_tokenizer: Make) -> None:
    from transformers import AutoTokenizer

    folder = make_tokenizer()
    [token_ids] = encode(folder, Sample("", "  naïve 中文 🙂"))
    assert AutoTokenizer.from_pretrained(folder).decode(token_ids[:-1]) == "  naïve 中文 🙂"


def test_conversation_that_the_template_refuses_is_one_line(make_tokenizer: Make) -> None:
    folder = make_tokenizer(template=REFUSING)
    twice = Sample("rows.jsonl:7", ({"role": "user", "content": "a"}, {"role": "user", "content": "b"}))
    assert refusal(folder, twice) == (
        f"the chat template refuses this sample: {folder}/chat_template.jinja:1: roles must alternate",
        "refused by the template",
    )
    assert encode(folder, CONVERSATION)


def test_tokenizer_without_eos_is_refused(make_tokenizer: Make) -> None:
    with pytest.raises(DataError, match="names no eos_token"):
        Renderer(make_tokenizer(eos=None))


def test_missing_empty_or_broken_tokenizer_folder_is_refused(tmp_path: Path, make_tokenizer: Make) -> None:
    with pytest.raises(DataError, match="no such folder"):
        Renderer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty: holds no tokenizer"):
        Renderer(tmp_path / "empty")
    folder = make_tokenizer()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="model: holds no tokenizer"):
        Renderer(folder)


def same_bos_and_eos(folder: Path) -> Path:
    """The tokenizer as one that begins and ends every text with the same token."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": "</s>"}))
    return folder


@pytest.mark.parametrize(
    ("end", "num_eos"),
    [(" \n", 0), ("</s>", 1), ("</s>\n", 1), ("  \n</s>", 1), ("</s></s>\n", 2), (" </s>\n\n</s> </s>\n ", 3)],
)
@pytest.mark.parametrize("kind", ["text", "file", "chat"])
@pytest.mark.parametrize("is_same", [False, True])
def test_whatever_eos_and_white_space_end_a_sample_one_eos_is_left(
    make_tokenizer: Make, tmp_path: Path, end: str, num_eos: int, kind: str, is_same: bool
) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}" + end.replace("\n", "{{ '\\n' }}")
    folder = make_tokenizer(template=template)
    expected = encode(folder, Sample("", "ab"))
    if is_same:
        same_bos_and_eos(folder)
    (tmp_path / "t.jinja").write_text("{{ text }}" + end + "{{ '' }}")
    renderer = Renderer(folder, {0: tmp_path / "t.jinja"} if kind == "file" else {})
    sample = CONVERSATION if kind == "chat" else Sample("", "ab" + end if kind == "text" else "ab")
    assert [renderer.encode(sample)] == expected
    assert renderer.num_double_eos == (num_eos > 1)


def test_a_beginning_that_is_the_eos_stays_and_one_inside_too(make_tokenizer: Make) -> None:
    folder = same_bos_and_eos(make_tokenizer())
    [token_ids] = encode(folder, Sample("", "</s>a</s> b</s>"))
    assert [i for i, token in enumerate(token_ids) if token == EOS] == [0, 2, len(token_ids) - 1]


@pytest.mark.parametrize("text", ["</s>", "<s>", " </s>\n</s> ", "<s></s>"])
def test_a_sample_of_special_tokens_alone_is_refused(make_tokenizer: Make, text: str) -> None:
    assert refusal(make_tokenizer(), Sample("r:1", text)) == (
        "the text holds nothing but special tokens; fill it, or leave such rows out with bad_rows: drop",
        "only special tokens",
    )
    assert refusal(make_tokenizer(template="{{ bos_token }}{{ eos_token }}\n", name="other"), CONVERSATION) == (
        "the chat template writes nothing for this sample; correct the template",
        "template wrote nothing",
    )


def test_the_fault_of_a_chat_template_is_named_by_file_and_line(make_tokenizer: Make) -> None:
    folder = make_tokenizer(template="{% for m in messages %}\n{{ m.said + '' }}\n{% endfor %}")
    text, _ = refusal(folder, CONVERSATION)
    assert text.endswith(f"refuses this sample: {folder}/chat_template.jinja:2: m.said: no such attribute")
