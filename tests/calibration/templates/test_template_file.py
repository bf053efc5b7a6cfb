"""Templates of the user's own: what they see, and what they may not do."""

from pathlib import Path

import pytest

from quantpipe.calibration.rows import Message
from quantpipe.calibration.templates.sandbox import LimitError
from quantpipe.calibration.templates.template_file import MAX_FILE_BYTES, TemplateFile
from quantpipe.errors import DataError

TALK: tuple[Message, ...] = (
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "Q2"},
)


def open_template(tmp_path: Path, text: str | bytes) -> TemplateFile:
    file = tmp_path / "t.jinja"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return TemplateFile(file)


@pytest.mark.parametrize(
    ("text", "content", "rendered"),
    [
        ("{{ bos_token }}{{ text }}{{ eos_token }}", "hi", "<s>hi</s>"),
        ("{{ system is none }} {{ prompt }} {{ response }}", TALK, "True Q A"),
        (
            "{% for m in messages %}{{ m.role }}:{{ m['content'] }}{{ '' if loop.last else ';' }}{% endfor %}",
            TALK,
            "user:Q;assistant:A;user:Q2",
        ),
        ("\ufeff{% if messages is none %}\n  {{ text }}\n{% endif %}\n", "hi", "  hi\n"),
        (
            "{{ 3 * 4 }}{% set n = namespace(x=1) %}{% for i in 'ab' %}{% set n.x = n.x * 2 %}{% endfor %}{{ n.x }}",
            "hi",
            "124",
        ),
    ],
)
def test_a_template_sees_the_sample_and_the_special_tokens(
    tmp_path: Path, text: str, content: str | tuple[Message, ...], rendered: str
) -> None:
    assert open_template(tmp_path, text).render(content, "<s>", "</s>") == rendered


def test_a_tokenizer_without_bos_writes_nothing_for_it(tmp_path: Path) -> None:
    assert open_template(tmp_path, "{{ bos_token }}{{ text }}").render("hi", None, "</s>") == "hi"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a\n{% for x in messages %}", ":2: not a Jinja template: Unexpected end of template"),
        ("{{ question }}", ": unknown variable 'question'; there are: messages, system, prompt, response, text, "),
        ("{% include 'other' %}", ":1: not a Jinja template: other files cannot be included; correct it"),
        (b"caf\xe9", ": byte 4 is not UTF-8; save the template as UTF-8"),
        (b"x" * (MAX_FILE_BYTES + 1), ": 1,048,577 bytes, a template has at most 1,048,576; give the path of a Jinja"),
        ("{{ " + "(" * 100_000 + " }}", ": nested too deeply; simplify the template"),
    ],
)
def test_what_is_no_template_is_refused_when_it_is_read(tmp_path: Path, text: str | bytes, problem: str) -> None:
    with pytest.raises(DataError) as caught:
        open_template(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path}/t.jinja{problem}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "more than 200,000 turns"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "call themselves too deeply"),
        (
            "{% macro f(n) %}{% if n %}{% set a = f(n-1) %}{% set b = f(n-1) %}{% endif %}{% endmacro %}{{ f(60) }}",
            "more than 200,000 turns",
        ),
        ("{% for i in range(99999) %}" + "x" * 500 + "{% endfor %}", "more than 16,777,216 characters"),
        ("{{ 'a' * 9999999999 }}", "'**', or '*' of something else than two numbers"),
        ("{{ 9 ** 9999999999 }}", "'**', or '*' of something else than two numbers"),
    ],
)
def test_a_template_without_end_is_stopped(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(LimitError, match=problem.replace("*", r"\*")):
        open_template(tmp_path, text).render("hi", "<s>", "</s>")


def test_the_limit_is_that_of_one_sample(tmp_path: Path) -> None:
    template = open_template(tmp_path, "{% for i in range(90000) %}{% endfor %}ok")
    assert [template.render("hi", "", "") for _ in range(4)] == ["ok"] * 4


def test_the_sandbox_lets_no_one_out(tmp_path: Path) -> None:
    from jinja2 import TemplateError

    template = open_template(tmp_path, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(TemplateError):
        template.render("hi", "", "")
