"""Pictures of panels: where bars, whiskers and points are."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from loadtest.panels import HEAD, HEIGHT, LABEL, MARGIN, VALUE, WIDTH, Panel, bars, document, points

SVG = "{http://www.w3.org/2000/svg}"
ROOM = WIDTH - LABEL - VALUE - 2 * MARGIN


def panel(of: Panel) -> ElementTree.Element:
    found = ElementTree.fromstring(document("t", [of], columns=1)).find(f"{SVG}g")
    assert found is not None
    return found


def test_the_longest_whisker_takes_the_room_and_all_else_is_in_proportion() -> None:
    found = panel(bars("t", "n", {"a": (4.0, 2.0, 8.0), "b": (2.0, 2.0, 2.0)}, 1))
    widths = [float(bar.attrib["width"]) for bar in found.findall(f"{SVG}rect")]
    assert widths == [ROOM / 2, ROOM / 4]
    ends = found.findall(f"{SVG}path")[0].attrib["d"]
    assert ends.startswith(f"M{MARGIN + LABEL + ROOM / 4:.1f} ")
    assert f"H{MARGIN + LABEL + ROOM:.1f}M" in ends


def test_ours_have_a_colour_of_their_own() -> None:
    found = panel(bars("t", "n", {"a": (1.0, 1.0, 1.0), "b": (1.0, 1.0, 1.0)}, 1, ours=["b"]))
    assert [bar.attrib["class"] for bar in found.findall(f"{SVG}rect")] == ["bar", "ours"]


def test_what_was_not_measured_has_no_bar_and_says_so() -> None:
    found = panel(bars("t", "n", {"a": (1.0, 1.0, 1.0), "b": None}, 1))
    assert len(found.findall(f"{SVG}rect")) == 1
    assert "not measured" in [text.text for text in found.findall(f"{SVG}text")]


def test_nothing_measured_or_nothing_but_zeros_is_drawn_all_the_same() -> None:
    for values in ({"a": None}, {"a": (0.0, 0.0, 0.0)}):
        ElementTree.fromstring(document("t", [bars("t", "n", values, 1)], columns=3))


def test_points_are_where_their_values_are_with_a_large_one_at_their_mean() -> None:
    found = panel(points("t", "x", "y", {"a": [(0.0, 0.0), (2.0, 1.0)]}))
    places = [(float(c.attrib["cx"]), float(c.attrib["cy"]), c.attrib["r"]) for c in found.findall(f"{SVG}circle")]
    (left, bottom, _), (right, top, _), (x, y, radius) = places
    assert left < right < WIDTH
    assert HEAD == top < bottom < HEIGHT
    assert (x, y, radius) == (pytest.approx((left + right) / 2), pytest.approx((top + bottom) / 2), "4.5")


def test_panels_stand_in_rows_of_so_many() -> None:
    small = bars("t", "n", {"a": (1.0, 1.0, 1.0)}, 1)
    picture = ElementTree.fromstring(document("t", [small] * 3, columns=2))
    places = [one.attrib["transform"] for one in picture.findall(f"{SVG}g")]
    assert places == [f"translate({x} {HEAD - 10 + y})" for x, y in ((0, 0), (WIDTH, 0), (0, small[0]))]
    assert picture.attrib["width"] == str(2 * WIDTH)


def test_words_are_escaped() -> None:
    text = document("a < b", [bars("<i>", "x & y", {"<b>": (1.0, 1.0, 1.0)}, 1)], columns=1)
    ElementTree.fromstring(text)
    assert "<b>" not in text
