"""Templates that would run for ever or fill the memory are refused; what they may do comes out as in plain Jinja."""

from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quantpipe.errors import RequestError
from quantpipe.serve import template_limits
from quantpipe.serve.chat import ChatTemplate
from quantpipe.serve.template_limits import MAX_ROUNDS

MESSAGES = [{"role": "user", "content": "<hi> 你好"}, {"role": "assistant", "content": "yes"}]


def render(source: str, messages: list[dict[str, Any]] = MESSAGES) -> str:
    return ChatTemplate.compile(source, {"bos_token": "<s>"}).render(messages)


LONG_LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
BOMBS = {
    "loop without output": LONG_LOOP.replace("BODY", "{% set c = b %}"),
    "loop with output": LONG_LOOP.replace("BODY", "x" * 50),
    "loop in a macro": "{% macro m() %}" + LONG_LOOP.replace("BODY", "") + "{% endmacro %}{{ m() }}",
    "filtered loop": LONG_LOOP.replace("BODY", "").replace("range(99999) %}{% e", "range(99999) if b %}{% e"),
    "macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "times": "{{ 'x' * 10000000000 }}",
    "times twice": "{% set a = 'x' * 99999 %}{{ a * 99999 }}",
    "times of a list": "{{ ([1] * 99999) * 99999 }}",
    "plus": "{% set ns = namespace(a='x') %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "tilde": "{% set ns = namespace(a='x') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "power of powers": "{% set ns = namespace(a=9) %}{% for i in range(60) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
    "nested lists": (
        "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}OUT"
    ).replace("OUT", "{{ ns.a }}"),
    "center": "{{ 'x'.center(10000000000) }}",
    "ljust by name": "{{ 'x'.ljust(width=10000000000) }}",
    "center as a filter": "{{ 'x' | center(10000000000) }}",
    "indent": "{{ 'x\ny' | indent(10000000000) }}",
    "tojson's indent": "{{ messages | tojson(indent=10000000000) }}",
    "replace": "{% set a = 'x' * 99999 %}{{ a.replace('x', a) }}",
    "replace nothing": "{% set a = 'x' * 99999 %}{{ a.replace('', a) }}",
    "replace as a filter": "{% set a = 'x' * 99999 %}{{ a | replace('x', a) }}",
    "join": "{% set a = 'x' * 99999 %}{{ a.join(a) }}",
    "join as a filter": "{% set a = 'x' * 99999 %}{{ range(99999) | list | join(a) }}",
    "expandtabs": "{% set a = '\t' * 99999 %}{{ a.expandtabs(99999) }}{{ a.expandtabs(9999999) }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "format by method": "{{ '{:>10000000000}'.format(1) }}",
    "format as a filter": "{{ '%10000000000d' | format(1) }}",
    "lipsum": "{{ lipsum(n=1000000000) }}",
    "range": "{% for a in range(10000000000) %}{% endfor %}",
}
NESTED = BOMBS["nested lists"].replace("{{ ns.a }}", "")
for number, out in enumerate(["{{ ns.a | tojson }}", "{{ 'x' ~ ns.a }}", "{{ '%s' % [ns.a] }}", "{{ ns.a | string }}"]):
    BOMBS[f"nested lists {number}"] = NESTED + out
BOMBS["nested lists formatted"] = NESTED + "{{ '{}'.format(ns.a) }}"


@pytest.mark.parametrize("name", BOMBS)
def test_template_without_measure_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(RequestError, match="the chat template") as caught:
        render(BOMBS[name])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert caught.value.param == "messages"


def test_time_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_RENDER_S", -1.0)
    with pytest.raises(RequestError, match="more than -1 seconds"):
        render("{% for m in messages %}{{ m.role }}{% endfor %}")
    assert render("{{ messages[0].role }}") == "user"


def test_rounds_are_counted_for_each_rendering_anew() -> None:
    template = ChatTemplate.compile("{% for i in range(14000) %}{% for k in range(9) %}{% endfor %}{% endfor %}", {})
    for _ in range(2):  # together they would exceed it
        assert 14_000 * 10 < MAX_ROUNDS < 2 * 14_000 * 10
        assert template.render(MESSAGES) == ""


ORDINARY = [
    "{% for m in messages %}{{ loop.index ~ m.role + ':' + m['content'] | trim }}{% else %}none{% endfor %}",
    "{% macro turn(m, mark='*') %}{{ mark * 3 }}{{ m.content.replace('<', '[') }}{% endmacro %}{{ turn(messages[0]) }}",
    "{% set ns = namespace(n=0) %}{% for m in messages if m.role %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ messages | map(attribute='role') | join(', ') }} {{ '%s-%05d' % ('a', 7) }} {{ '{:>8}'.format('x') }}",
    "{{ (messages | length) ** 2 }} {{ 7 % 4 }} {{ 1.5 * 2 }} {{ [1] + [2] }} {{ messages[0] | string | length }}",
    "{% for group in messages | batch(2) %}{{ group | length }}{% endfor %}{{ 'a\nb' | indent(2) }}",
    "{{ messages[0].content.split('>')[-1].strip() }} {{ 'x' | center(5) }} {{ (1, 2) * 2 }}",
    "{% macro outer() %}<{{ caller(1) }}>{% endmacro %}{% call(x) outer() %}{{ x }}{% endcall %}",
    "{% for a in [[1, [2]], 3] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}",
]


@pytest.mark.parametrize("source", ORDINARY)
def test_ordinary_templates_render_as_in_plain_jinja(source: str) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    assert render(source) == plain.render(messages=MESSAGES)


def test_template_cannot_set_the_meter_aside() -> None:
    source = "{% set environment = none %}{% set count_round = none %}{% set context = none %}"
    with pytest.raises(RequestError, match="rounds of loops"):
        render(source + LONG_LOOP.replace("BODY", ""))


def test_long_conversations_are_well_within_the_limits() -> None:
    messages = [{"role": "user", "content": "word " * 2000}] * 300
    source = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content.replace('word', 'words') | trim }}{% endfor %}"
    assert len(render(source, messages)) > 3_000_000
