"""No path of the machine that made a report is in it."""

from pathlib import Path

import pytest
from reports import a_report

from quantpipe.reporting.json_form import render_json
from quantpipe.reporting.paths import roots_of, shorten, without_paths

ROOTS = {
    Path("/home/ann/project"): ".",
    Path("/data/out"): "OUTPUT",
    Path("/home/ann"): "~",
    Path("/opt/a b"): "WITH SPACE",
}


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("quantpipe run /home/ann/project/recipes/a.yaml", "quantpipe run ./recipes/a.yaml"),
        ("in /home/ann/project", "in ."),
        ("verify /data/out/artifact", "verify OUTPUT/artifact"),
        ("--set output=/data/out", "--set output=OUTPUT"),
        ("see /home/ann/models/m.gguf, please", "see ~/models/m.gguf, please"),
        ("(/srv/secret/place/m.gguf)", "(.../m.gguf)"),
        ("https://host/path/to/it and s3://bucket/key/x", "https://host/path/to/it and s3://bucket/key/x"),
        ("recipes/a/b.yaml and ../x/y and ~/a/b", "recipes/a/b.yaml and ../x/y and ~/a/b"),
        ("in /opt/a b/runs/x, /opt/a bc/y and /opt/a b", "in WITH SPACE/runs/x, .../a bc/y and WITH SPACE"),
        ("/home/annex/file.txt", ".../file.txt"),
        ("name \udcff", "name ?"),
        ("GET /health, 3 / 4, a/b/c", "GET /health, 3 / 4, a/b/c"),
        ("TTFT ratio candidate / baseline", "TTFT ratio candidate / baseline"),
    ],
)
def test_paths_are_shortened_and_nothing_else(text: str, short: str) -> None:
    assert shorten(text, ROOTS) == short


def test_a_whole_report_is_rid_of_them(tmp_path: Path) -> None:
    report = a_report(base_origin=f"{tmp_path}/secret/model.gguf")
    clean = without_paths(report, roots_of(tmp_path / "run"))
    assert str(tmp_path) not in render_json(clean)
    assert "model.gguf" in clean.context.base_origin
    assert clean.checks == report.checks
    assert clean.verdict is report.verdict
