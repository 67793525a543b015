"""How far the simulator is from a live server whose figures are kept."""

from __future__ import annotations

import json

import pytest

from loadtest.marks import with_text
from loadtest.sim.plots import README
from loadtest.sim.validation import LIVE, LOADS, compare, live_figures, simulated_figures, table

LIVE_RESULTS = json.loads(LIVE.read_text())
MOST_RATIO = 1.75
"""The largest factor between the two, for each figure, either way. The live server shares its two cores with the
client, Ray and the ingress."""


def test_every_simulated_figure_is_near_the_measured_one() -> None:
    rows = compare(LIVE_RESULTS)
    assert len(rows) == 3 * len(LOADS)
    assert {row["figure"]: row["ratio"] for row in rows if not 1 / MOST_RATIO <= row["ratio"] <= MOST_RATIO} == {}


def test_what_is_measured_is_the_median_of_our_own_rounds() -> None:
    figures = [dict.fromkeys(("ttft_ms", "tpot_ms", "tokens_per_s"), at) for at in (1.0, 2.0, 9.0)]
    rounds = [{"chunkserve-no-drafts": {"scenarios": {"single": found}}} for found in figures]
    assert live_figures({"rounds": rounds}, "single")["tpot_ms"] == 2.0


def test_a_client_asks_again_only_when_it_was_answered() -> None:
    load = {"requests": 6, "clients": 1, "prompt": 20, "answer": 10}
    alone = simulated_figures(load)
    together = simulated_figures({**load, "clients": 3})
    assert together["ttft_ms"] >= alone["ttft_ms"]
    assert alone["tokens_per_s"] < together["tokens_per_s"] < 3 * alone["tokens_per_s"]
    taken_s = (alone["ttft_ms"] + 9 * alone["tpot_ms"]) / 1000
    assert alone["tokens_per_s"] == pytest.approx(10 / taken_s, rel=1e-6)


def test_the_page_has_the_comparison_as_it_is() -> None:
    page = README.read_text()
    assert with_text(page, "validation", table(compare(LIVE_RESULTS))) == page
