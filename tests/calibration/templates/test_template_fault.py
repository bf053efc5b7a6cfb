"""What is said of a template that fails: line and kind of mistake, and no word of the row."""

from pathlib import Path

import pytest

from quantpipe.calibration.rows import Message
from quantpipe.calibration.templates.template_fault import line_of, mistake_in
from quantpipe.calibration.templates.template_file import TemplateFile

SECRET = "Mrs Jones"
TALK: tuple[Message, ...] = ({"role": "user", "content": SECRET},)


def fault_of(folder: Path, text: str) -> tuple[int | None, str]:
    (folder / "t.jinja").write_text(text)
    template = TemplateFile(folder / "t.jinja")
    with pytest.raises(Exception) as caught:  # of any kind
        template.render(TALK, "<s>", "</s>")
    return line_of(caught.value), mistake_in(text, caught.value, template.limits)


@pytest.mark.parametrize(
    ("text", "line", "mistake"),
    [
        ("a\n{{ messages[0].foo }}", 2, "messages[0].foo: no such attribute"),
        ("{% for m in messages %}\n\n{{ m['foo'].bar }}{% endfor %}", 3, "m['foo']: no such attribute"),
        ("{{ messages[1].content }}", 1, "messages[1]: no such attribute"),
        ("{{ messages[0][prompt] }}", 1, "messages[0][prompt]: no such attribute"),
        ("{% macro f(m) %}\n{{ m.foo }}{% endmacro %}\n{{ f(messages[0]) }}", 2, "m.foo: no such attribute"),
        ("{% if prompt is none %}{% set x = 1 %}{% endif %}\n{{ x }}", 2, "x: no such variable"),
        ("\n\n{{ prompt + 1 }}", 3, 'can only concatenate str (not "int") to str'),
        ("{{ 1 / 0 }}", 1, "division by zero"),
        ("{{ prompt | int('x') | abs }}", 1, "TypeError"),
        ("\n{{ '%d' | format(prompt) }}", 2, "TypeError"),
        ("{{ raise_exception('no ' + prompt) }}", 1, "raise_exception was called"),
        ("\n{{ raise_exception('two turns, please') }}", 2, "two turns, please"),
        ("{{ prompt.__class__.mro }}", 1, "something that the sandbox does not allow"),
        (
            "{% for i in range(9999) %}\n{% for j in range(9999) %}{% endfor %}{% endfor %}",
            2,
            "more than 200,000 turns",
        ),
        ("{% macro f(n) %}\n{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", 2, "macros that call themselves too deeply"),
    ],
)
def test_line_and_mistake(tmp_path: Path, text: str, line: int | None, mistake: str) -> None:
    found = fault_of(tmp_path, text)
    assert found[0] == line
    assert found[1].startswith(mistake)
    assert SECRET not in found[1]


def test_an_attribute_of_a_template_with_extensions_is_not_looked_up() -> None:
    from jinja2 import UndefinedError

    error = UndefinedError(f"'dict object' has no attribute '{SECRET}'")
    assert mistake_in("{% generation %}{{ m.foo }}{% endgeneration %}", error) == "no such attribute"
