"""Names of fields in errors: shown only where it is sure enough that they are names, and no row of a customer's data.

A CSV file may lack its header, and keys of JSON objects may be data: then the names are only counted.
"""

import difflib
import re
from collections.abc import Collection, Sequence

MOST_SHOWN = 20
LONGEST_NAME = 40
LONGEST_WORD = 16
MOST_WORDS = 2
MOST_DIGITS = 5
NAME_COLUMNS = "name the columns of a file without header in order: columns: [...]"
LEAST_SURE = 2  # words that headers have, for a first row to be one
LEAST_LIKENESS = 0.6
LEAST_LIKENESS_HIDDEN = 0.75
_IDENTIFIER = re.compile(r"[\w.-]+( [\w.-]+)?")
# Names as programs give them. A word in other letters may as well be a person, a place or an illness: such names are
# shown beside a word that is surely a name.
_PLAIN = re.compile(r"[a-z_][A-Za-z0-9_.-]*")
_HEADER_WORDS = """
id text name label date time title body subject question answer prompt response instruction input output content message
messages role context category topic language lang comment description summary user customer
文本 问题 回答 答案 内容 标题 编号 序号 类别 日期 姓名 提问 回复 消息 角色 语言
"""


def there_are(
    what: str,
    asked: str,
    names: Sequence[str],
    known: Collection[str] = (),
    is_first_row: bool = False,
    is_data: bool = False,
) -> str:
    """What an error says of the names that there are instead of ``asked``, with the nearest where one is near.

    ``known`` are other names that the set uses: one of them among ``names`` shows that these are names.
    ``is_first_row``: they are the first row of a file, which may have no header. ``is_data``: they seem to be none.
    """
    if is_data:
        number = "1 column" if len(names) == 1 else f"{len(names):,} columns"
        return f"there are: {number} (the first row may be data: its values come again); {NAME_COLUMNS}"
    are_shown = are_names(names, (asked, *known), is_first_row)
    likeness = LEAST_LIKENESS if are_shown else LEAST_LIKENESS_HIDDEN
    candidates = [name for name in names if _could_be_name(name)]
    near = difflib.get_close_matches(asked, candidates, n=1, cutoff=likeness)
    correct = "correct the name in the set"
    if is_first_row and not are_shown:
        correct = f"{correct}, or {NAME_COLUMNS}"
    hint = f"; did you mean {near[0]!r}?" if near else f"; {correct}"
    return f"there are: {shown_names(what, names, (asked, *known), is_first_row)}{hint}"


def shown_names(what: str, names: Sequence[str], known: Collection[str] = (), is_first_row: bool = False) -> str:
    """The names, or their number where they may be data. ``what``: column or field."""
    if not names:
        return "none"
    if are_names(names, known, is_first_row):
        more = [f"... {len(names) - MOST_SHOWN} more"] if len(names) > MOST_SHOWN else []
        return ", ".join([*(name or "(without a name)" for name in names[:MOST_SHOWN]), *more])
    number = f"1 {what}" if len(names) == 1 else f"{len(names):,} {what}s"
    why = "the file may lack its header" if is_first_row else "names that may be data are not shown"
    return f"{number} ({why})"


def are_names(names: Sequence[str], known: Collection[str] = (), is_first_row: bool = False) -> bool:
    """Whether a row holds names of fields for sure enough to show them.

    The first row of a file may be data, in which any word may stand, and now and then one that headers have: it takes a
    name that the set uses, or two such words.
    """
    if not all(not name or _could_be_name(name) for name in names):
        return False
    lower = {name.lower() for name in names}
    if lower & {name.lower() for name in known}:
        return True
    header_words = set(_HEADER_WORDS.split())
    num_sure = sum(name in header_words or name.endswith("_id") for name in lower)
    if is_first_row:
        return num_sure >= LEAST_SURE
    return num_sure > 0 or all(_PLAIN.fullmatch(name) for name in names)


def _could_be_name(name: str) -> bool:
    """Whether this can be a name: one or two short words, of which not all are numbers."""
    words = name.split(" ")
    return (
        len(name) <= LONGEST_NAME
        and len(words) <= MOST_WORDS
        and (len(words) == 1 or all(len(word) <= LONGEST_WORD for word in words))
        and _IDENTIFIER.fullmatch(name) is not None
        and any(character.isalpha() for character in name)
        and sum(character.isdigit() for character in name) <= MOST_DIGITS
    )
