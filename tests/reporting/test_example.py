"""The example in the documentation is what the code renders, and names nothing of the machine that made it."""

import re
from pathlib import Path
from typing import get_args

from quantpipe.gate.record import REPORT_NAMES
from quantpipe.reporting.exhibits import Exhibit
from quantpipe.reporting.html.document import render_html
from quantpipe.reporting.json_form import read_json

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def test_the_example_is_rendered_by_this_code() -> None:
    again = f"write render_html(read_json({EXAMPLES.name}/report.json)) to report.html beside it"
    rendered = render_html(read_json(EXAMPLES / "report.json"))
    assert (EXAMPLES / "report.html").read_text(encoding="utf-8") == rendered, again


def test_the_example_has_no_path_of_a_machine() -> None:
    for name in ("report.html", "report.json"):
        text = (EXAMPLES / name).read_text(encoding="utf-8")
        assert re.findall(r"(?<![\w.<])/(?:home|root|tmp|usr|var|work|Users|mnt|data)/", text) == []


def test_the_documentation_names_every_file_and_every_kind_of_exhibit() -> None:
    text = (EXAMPLES.parent / "reports.md").read_text(encoding="utf-8")
    files = re.findall(r"^\| `([a-z_]+\.[a-z]+)` \|", text, re.MULTILINE)
    assert sorted(files) == sorted(REPORT_NAMES)
    for kind in get_args(get_args(Exhibit)[0]):
        assert f"`{kind.__dataclass_fields__['kind'].default}`" in text
