"""The chart of the comparison with peers, and its tables in docs/benchmarks/peers.md."""

from __future__ import annotations

import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.peers.chart import CHART, MARK, PAGE, PANELS, main, svg, with_tables
from benchmarks.peers.comparison import table
from benchmarks.peers.run import RESULTS, failures
from benchmarks.peers.servers import USUAL
from loadtest.marks import marks
from tests.benchmarks.peers.test_comparison import document

BEGIN, END = marks(MARK)
SVG = "{http://www.w3.org/2000/svg}"
FIGURES = {f"{row.scenario}.{row.figure}": [4.0, 3.0, 8.0] for row in PANELS}


def drawn(found: dict[str, Any]) -> ElementTree.Element:
    return ElementTree.fromstring(svg(found))


def test_each_scenario_has_a_panel_with_a_labelled_bar_for_each_server() -> None:
    panels = drawn(document(chunkserve=FIGURES, vllm=FIGURES, ray_llm=FIGURES)).findall(f"{SVG}g")
    assert len(panels) == len(PANELS)
    for row, panel in zip(PANELS, panels, strict=True):
        texts = [text.text for text in panel.findall(f"{SVG}text")]
        assert texts[0] == row.title
        assert {"chunkserve", "vLLM", "Ray Serve LLM"} <= set(texts)
        assert len(panel.findall(f"{SVG}rect")) == 3


def test_a_bar_is_as_long_as_its_median_and_its_whiskers_go_from_least_to_most() -> None:
    twice = {key: [2 * value for value in values] for key, values in FIGURES.items()}
    panel = drawn(document(chunkserve=FIGURES, vllm=twice)).find(f"{SVG}g")
    assert panel is not None
    ours, theirs = panel.findall(f"{SVG}rect")
    assert float(theirs.attrib["width"]) == pytest.approx(2 * float(ours.attrib["width"]), abs=0.2)
    assert (ours.attrib["class"], theirs.attrib["class"]) == ("ours", "bar")
    (found,) = re.findall(r"M([\d.]+) \d+H([\d.]+)M", panel.findall(f"{SVG}path")[0].attrib["d"])
    least, most = (float(x) - float(ours.attrib["x"]) for x in found)
    unit = float(ours.attrib["width"]) / 4.0
    assert (least, most) == (pytest.approx(3 * unit, abs=0.2), pytest.approx(8 * unit, abs=0.2))


def test_a_server_without_figures_is_drawn_as_not_measured() -> None:
    text = svg(document(failed={"vllm": "it broke"}, chunkserve=FIGURES))
    assert text.count("not measured") == len(PANELS)


def test_the_chart_has_colours_for_dark_pages() -> None:
    assert "prefers-color-scheme: dark" in svg(document(chunkserve=FIGURES))


def test_the_tables_replace_those_between_their_marks_and_nothing_else() -> None:
    found = document(chunkserve=FIGURES)
    once = with_tables(f"before\n{BEGIN}\nold\n{END}\nafter\n", found)
    assert once == f"before\n{BEGIN}\n\n{table(found)}\n\n{END}\nafter\n"
    assert with_tables(once, found) == once


@pytest.mark.parametrize("page", ["", f"{BEGIN} {BEGIN} {END}", f"{END} only"])
def test_a_page_without_the_marks_is_left_alone(page: str, tmp_path: Any) -> None:
    results, path = tmp_path / "peers.json", tmp_path / "peers.md"
    results.write_text(json.dumps(document(chunkserve=FIGURES)))
    path.write_text(page)
    with pytest.raises(ValueError):
        main(["--results", str(results), "--page", str(path), "--out", str(tmp_path / "chart.svg")])
    assert path.read_text() == page


# --- what the repository shows --------------------------------------------------------------------------------------


def test_the_chart_and_the_tables_are_what_the_results_say() -> None:
    found = json.loads(RESULTS.read_text())
    assert CHART.read_text() == svg(found), "run `make chart`"
    assert PAGE.read_text() == with_tables(PAGE.read_text(), found), "run `make chart`"


def test_the_results_are_of_all_servers_and_nothing_failed() -> None:
    found = json.loads(RESULTS.read_text())
    assert found["servers"] == list(USUAL)
    assert failures(found) == []
