"""Line charts: where their points are."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from loadtest.plots import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, TOP, WIDTH, chart, linear, logarithmic, nines

SVG = "{http://www.w3.org/2000/svg}"


def paths(text: str, kind: str) -> list[list[tuple[float, float]]]:
    found = ElementTree.fromstring(text).findall(f"{SVG}path")
    of_kind = [path.attrib["d"] for path in found if path.attrib["class"] == kind and "L" in path.attrib["d"]]
    return [[(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", d)] for d in of_kind]


def test_a_lines_ends_are_where_its_values_are() -> None:
    text = chart("t", "x", {"a": [(0.0, 0.0), (10.0, 4.0)]})
    (line,) = paths(text, "line s0")
    assert line == [(LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, TOP)]


def test_each_line_has_a_colour_and_a_name() -> None:
    text = chart("t", "x", {"first": [(0.0, 1.0), (1.0, 2.0)], "second": [(0.0, 2.0), (1.0, 1.0)]})
    assert len(paths(text, "line s0")) == len(paths(text, "line s1")) == 1
    assert ">first<" in text
    assert ">second<" in text


def test_a_single_point_is_a_dot() -> None:
    assert 'class="dot s0"' in chart("t", "x", {"a": [(1.0, 1.0)]})


def test_words_are_escaped() -> None:
    text = chart("a < b", "x & y", {"<i>": [(0.0, 1.0)]}, marks=[(0.0, "<script>")])
    ElementTree.fromstring(text)
    assert "<script>" not in text


def test_more_lines_than_can_be_told_apart_are_refused() -> None:
    with pytest.raises(ValueError, match=str(COLOURS)):
        chart("t", "x", {str(i): [(0.0, 1.0)] for i in range(COLOURS + 1)})


@pytest.mark.parametrize("most", [0.0, 0.0031, 0.9, 1.0, 7.0, 99.0, 12_345.0])
def test_a_linear_axis_holds_its_values_and_has_few_round_ticks(most: float) -> None:
    axis = linear([most / 2, most])
    assert axis.low == 0.0
    assert axis.high >= most
    assert 3 <= len(axis.ticks) <= 6
    assert axis.ticks[-1][0] == pytest.approx(axis.high)


def test_a_logarithmic_axis_gives_each_power_of_ten_the_same_room() -> None:
    axis = logarithmic([0.5, 300.0])
    places = [axis.pixel(value, 0.0, 100.0) for value, _ in axis.ticks]
    assert [words for _, words in axis.ticks] == ["0.1", "1", "10", "100", "1000"]
    assert places == pytest.approx([0, 25, 50, 75, 100])
    assert axis.pixel(0.0, 0.0, 100.0) == 0.0  # values that have no logarithm are at the edge


def test_the_last_percentiles_get_as_much_room_as_the_first() -> None:
    axis = nines()
    places = [axis.pixel(share, 0.0, 300.0) for share in (0.0, 0.9, 0.99, 0.999)]
    assert places == pytest.approx([0, 100, 200, 300])
