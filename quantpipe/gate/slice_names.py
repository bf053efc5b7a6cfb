"""How a measurement of a part of the data is called: ``mean_kl[domain=chinese]``. The one rule for such names.

What is measured against a stored baseline has a name of its own, so that it is never compared with the exact figure.

Fields are in order of name; a value with other characters than letters, digits, blanks and ``._:/+-`` is JSON text.
"""

import json
import re
from collections.abc import Mapping

TOP_K_SUFFIX = "_topk"
_PLAIN = re.compile(r"[\w.:/+-]+(?: [\w.:/+-]+)*")
_FIELD = re.compile(r'(?P<key>[\w.-]+)=(?P<value>"(?:[^"\\]|\\.)*"|[\w.:/+-]+(?: [\w.:/+-]+)*)')


def sliced_name(metric: str, fields: Mapping[str, str]) -> str:
    """The name of ``metric`` measured where the data's fields have these values; without any, of all data."""
    if not fields:
        return metric
    return f"{metric}[{','.join(f'{key}={_shown(value)}' for key, value in sorted(fields.items()))}]"


def split_name(name: str) -> tuple[str, dict[str, str]] | None:
    """The reverse: a metric and the fields it is of; None where ``name`` is not written by that rule."""
    metric, bracket, rest = name.partition("[")
    if not bracket:
        return metric, {}
    found = list(_FIELD.finditer(rest))
    try:
        fields = {each["key"]: _value(each["value"]) for each in found}
    except json.JSONDecodeError:
        return None
    return (metric, fields) if found and sliced_name(metric, fields) == name else None


def _shown(value: str) -> str:
    return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)


def _value(text: str) -> str:
    return str(json.loads(text)) if text.startswith('"') else text
