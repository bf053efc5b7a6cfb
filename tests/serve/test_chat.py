"""Chat templates in the sandbox."""

import pytest

from quantpipe.errors import ArtifactError, RequestError
from quantpipe.serve.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "<hi> 你好"}]


def render(source: str) -> str:
    return ChatTemplate.compile(source, {"bos_token": "<s>"}).render(MESSAGES)


def test_template_sees_messages_special_tokens_and_the_generation_prompt() -> None:
    source = "{{ bos_token }}{{ messages[0]['content'] }}{% if add_generation_prompt %}!{% endif %}"
    assert render(source) == "<s><hi> 你好!"


def test_tojson_writes_plain_json_without_html_escapes() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "<hi> 你好"}'
    assert render("{{ messages | tojson(indent=1) }}").count("\n") == 5


def test_block_lines_leave_no_blank_lines_behind() -> None:
    assert render("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n") == "user\n"


def test_strftime_now_and_loop_controls_and_generation_tags_work() -> None:
    assert render("{{ strftime_now('%Y') }}").isdigit()
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c") == "abuserc"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must\nalternate') }}",
        "{{ messages[0].missing.deeper }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 // 0 }}",
        "{{ messages[0]['content'] + 1 }}",
        "{% for i in range(999999999) %}{% endfor %}",
    ],
)
def test_template_that_fails_or_leaves_the_sandbox_is_a_one_line_request_error(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value)


def test_raise_exception_reaches_the_client_in_the_templates_words() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_invalid_template_is_an_artifact_error_with_its_line() -> None:
    with pytest.raises(ArtifactError, match="line 2"):
        render("ok\n{% if %}")
