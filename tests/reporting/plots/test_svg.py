"""Text from outside cannot become markup, and numbers are short."""

from xml.etree import ElementTree

from quantpipe.reporting.plots.svg import box, drawing, element, fitted, text_px, words


def test_text_and_attributes_are_escaped() -> None:
    root = ElementTree.fromstring(
        drawing(10, 10, '<a> "b"', "c & d", words(0, 0, "<i>&</i>"), box(0, 0, 1, 1, "k", "<"))
    )
    assert root.get("aria-label") == '<a> "b": c & d'
    assert [each.text for each in root.iter("text")] == ["<i>&</i>"]
    assert [each.text for each in root.iter("title")] == ["<"]


def test_places_are_rounded_and_nothing_that_is_no_number_gets_in() -> None:
    assert element("line", {"x1": 1.26, "y1": 2.0, "x2": float("nan")}) == '<line x1="1.3" y1="2" x2="0"/>'


def test_long_labels_are_cut_to_their_room() -> None:
    assert fitted("short", 100) == "short"
    cut = fitted("a label that is far too long for its place", 100)
    assert cut.endswith("..")
    assert text_px(cut) <= 105
    assert text_px("标签") > text_px("ab")
