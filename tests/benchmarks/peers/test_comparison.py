"""What the comparison with peers reports: medians, ratios, vLLM's better setting, aims, and the tables of them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.peers.comparison import ROWS, Aim, Row, best_vllm, by_round, figure, ratio, row_of, table

TPOT, TOKENS = row_of("single", "tpot_ms"), row_of("closed", "tokens_per_s")
GAP, LONG_TTFT = row_of("mixed", "longest_gap_ms"), row_of("mixed", "long_ttft_ms")
COLD_START = row_of("", "cold_start_s")


def document(failed: dict[str, str] | None = None, **figures: dict[str, list[float]]) -> dict[str, Any]:
    """Make a document. `figures` maps each server to its rows ("single.tpot_ms"), with one value per round."""
    servers = {name.replace("_", "-"): of_server for name, of_server in figures.items()}
    num_rounds = max(len(values) for of_server in servers.values() for values in of_server.values())
    rounds: list[dict[str, Any]] = [{} for _ in range(num_rounds)]
    for name, of_server in servers.items():
        for key, values in of_server.items():
            scenario, _, what = key.rpartition(".")
            for lives, value in zip(rounds, values, strict=False):
                life = lives.setdefault(name, {"scenarios": {}})
                (life["scenarios"].setdefault(scenario, {}) if scenario else life)[what] = value
    measured_with = {"short": False, "cpu": "two cores", "commit": "abc", "peers": {"vllm": "1.0", "ray": "2.0"}}
    return {**measured_with, "servers": [*servers, *(failed or {})], "failed": failed or {}, "rounds": rounds}


def test_a_figure_is_the_median_with_the_least_and_most_of_the_rounds() -> None:
    found = document(vllm={"single.tpot_ms": [3.0, 1.0, 8.0], "cold_start_s": [20.0, 30.0]})
    assert figure(found, "vllm", TPOT) == (3.0, 1.0, 8.0)
    assert figure(found, "vllm", COLD_START) == (25.0, 20.0, 30.0)
    assert figure(found, "ray-llm", TPOT) is None
    assert by_round(found, "vllm", COLD_START) == {0: 20.0, 1: 30.0}


def test_a_ratio_is_that_of_the_medians_and_its_range_that_of_the_rounds() -> None:
    found = document(chunkserve={"single.tpot_ms": [2.0, 6.0, 4.0]}, vllm={"single.tpot_ms": [10.0, 10.0, 5.0]})
    assert ratio(found, TPOT, "vllm") == (0.4, 0.2, 0.8)  # The median of the rounds' ratios would be 0.6.


def test_a_ratio_needs_a_round_that_both_have() -> None:
    found = document(chunkserve={"single.tpot_ms": [2.0]}, vllm={"closed.tokens_per_s": [10.0]})
    assert ratio(found, TPOT, "vllm") is None
    assert ratio(found, TOKENS, "vllm") is None


def test_vllms_better_setting_is_the_lower_time_and_the_higher_throughput() -> None:
    found = document(
        vllm={"single.tpot_ms": [10.0], "closed.tokens_per_s": [500.0]},
        vllm_512={"single.tpot_ms": [11.0], "closed.tokens_per_s": [550.0]},
    )
    assert (best_vllm(found, TPOT), best_vllm(found, TOKENS)) == ("vllm", "vllm-512")
    assert best_vllm(found, GAP) is None


def test_long_prompts_are_compared_at_the_setting_that_disturbs_streams_least() -> None:
    """The other setting answers long prompts sooner, but only by holding the streams up: one cannot have both."""
    found = document(
        vllm={"mixed.longest_gap_ms": [600.0], "mixed.long_ttft_ms": [500.0]},
        vllm_512={"mixed.longest_gap_ms": [250.0], "mixed.long_ttft_ms": [700.0]},
    )
    assert (best_vllm(found, GAP), best_vllm(found, LONG_TTFT)) == ("vllm-512", "vllm-512")


@pytest.mark.parametrize(
    ("aim", "value", "is_met"),
    [(Aim(0.4), 0.4, True), (Aim(0.4), 0.41, False), (Aim(2.2, True), 2.2, True), (Aim(2.2, True), 2.1, False)],
)
def test_an_aim_is_met_at_its_limit_and_not_beyond(aim: Aim, value: float, is_met: bool) -> None:
    assert aim.is_met(value) is is_met


def test_every_row_that_is_compared_with_vllm_says_which_way_is_better() -> None:
    def agrees(row: Row) -> bool:
        return all(aim.at_least is row.more_is_better for aim in (row.of_vllm, row.of_ray_llm) if aim)

    assert all(map(agrees, ROWS))


def test_the_tables_show_every_server_the_ratios_and_whether_each_aim_is_met() -> None:
    found = document(
        chunkserve={"single.tpot_ms": [4.0, 4.4, 3.9], "closed.tokens_per_s": [1000.0], "cold_start_s": [25.0]},
        vllm={"single.tpot_ms": [10.0, 11.0, 12.0], "closed.tokens_per_s": [500.0]},
        ray_llm={"closed.tokens_per_s": [250.0]},
    )
    text = table(found)
    assert "two cores; rounds: 3; chunkserve at abc; the peers with vllm 1.0, ray 2.0." in text
    assert "| | chunkserve | vLLM | Ray Serve LLM |" in text
    assert "| alone: ms a token | 4.0 (3.9–4.4) | 11.0 (10.0–12.0) | – |" in text
    assert "| alone: ms a token | 0.36 (0.33–0.40), vLLM | ≤ 0.45: met | – |  |" in text
    assert "| 16 clients: tokens/s | 2.00 (2.00–2.00), vLLM | ≥ 2.2: missed | 4.00 (4.00–4.00) | ≥ 3: met |" in text
    assert "- command to first token, s: 25.0 (25.0–25.0), aim ≤ 20: missed" in text


def test_without_drafts_we_are_held_to_the_same_aims_in_a_table_of_its_own() -> None:
    found = document(
        chunkserve={"single.tpot_ms": [2.0]},
        chunkserve_no_drafts={"single.tpot_ms": [5.0]},
        vllm={"single.tpot_ms": [10.0]},
    )
    with_drafts, without = table(found).split("| chunkserve ÷ ")[1].split("| chunkserve, no drafts ÷ ")
    assert "| alone: ms a token | 0.20 (0.20–0.20), vLLM | ≤ 0.45: met |" in with_drafts
    assert "| alone: ms a token | 0.50 (0.50–0.50), vLLM | ≤ 0.45: missed |" in without


def test_each_of_ours_has_a_table_of_ratios_and_a_peer_that_was_not_asked_for_no_column() -> None:
    figures = {"single.tpot_ms": [4.0]}
    text = table(document(chunkserve_rounded=figures, chunkserve_stored=figures, vllm={"single.tpot_ms": [10.0]}))
    assert (
        "| chunkserve, weights as stored, activations in int8 ÷ | vLLM's better setting | aim |\n|---|---|---|\n"
        in text
    )
    assert "| chunkserve, weights as stored ÷ | vLLM's better setting | aim |" in text
    assert text.count("| alone: ms a token | 0.40 (0.40–0.40), vLLM | ≤ 0.45: met |") == 2
    assert "Ray Serve LLM" not in text
    assert "aim ≤ 20" not in text, "how soon a server is there is asked of it as it comes"


def test_a_server_that_failed_has_a_column_and_is_named_with_the_reason() -> None:
    found = document(failed={"ray-llm": "it broke"}, chunkserve={"single.tpot_ms": [4.0]})
    text = table(found)
    assert "| | chunkserve | Ray Serve LLM |" in text
    assert "Ray Serve LLM was not measured: it broke" in text


def test_a_short_run_says_that_its_figures_do_not_count() -> None:
    found = document(chunkserve={"single.tpot_ms": [4.0]})
    assert "A short run" not in table(found)
    assert "A short run" in table({**found, "short": True})
