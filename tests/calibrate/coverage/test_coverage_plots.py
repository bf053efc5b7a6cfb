import struct
import warnings
from pathlib import Path

import matplotlib
import pytest
from calibrate.coverage.made_coverage import activations, text_coverage

from quantpipe.calibrate.coverage.coverage_plots import (
    BEYOND_PLOT,
    SATURATION_PLOT,
    TEXT_PLOT,
    drawable,
    plot_beyond,
    plot_saturation,
    plot_text,
)


def size_of(path: Path) -> tuple[int, int]:
    """Width and height that a PNG file says it has."""
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    return width, height


def test_every_plot_is_a_png_and_nothing_else_is_left(tmp_path: Path) -> None:
    plot_text(text_coverage(), tmp_path)
    plot_beyond(activations(), tmp_path)
    plot_saturation(activations(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {TEXT_PLOT, BEYOND_PLOT, SATURATION_PLOT}
    assert all(width > 300 and height > 100 for width, height in map(size_of, tmp_path.iterdir()))


def test_many_domains_make_no_larger_pictures_than_a_few_more_panels(tmp_path: Path) -> None:
    plot_beyond(activations(domains=("a",)), tmp_path)
    one = size_of(tmp_path / BEYOND_PLOT)
    plot_beyond(activations(domains=tuple(f"topic {i}" for i in range(40))), tmp_path)
    many = size_of(tmp_path / BEYOND_PLOT)
    assert one[0] < many[0] <= 3 * one[0] + 10
    assert many[1] <= 2 * one[1] + 10


@pytest.mark.filterwarnings("error")
def test_names_that_the_font_cannot_draw_are_numbered_and_warn_of_nothing(tmp_path: Path) -> None:
    assert drawable(["cards", "客服", "prix en $", "x" * 99]) == ["cards", "(2)", r"prix en \$", "x" * 23 + "..."]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_text(text_coverage(domains=("客服", "$x$_{", "a\\b")), tmp_path)
    assert size_of(tmp_path / TEXT_PLOT)


def test_nothing_of_matplotlib_is_changed_for_others(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    plot_text(text_coverage(), tmp_path)
    assert dict(matplotlib.rcParams) == before
