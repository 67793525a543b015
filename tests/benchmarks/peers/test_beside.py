"""The comparisons with vLLM beside long prompts and with llama.cpp: their loads, servers and tables."""

from __future__ import annotations

import dataclasses

from benchmarks.peers import beside, llama_cpp
from benchmarks.peers.servers import SERVERS
from loadtest.scenarios import BESIDE
from tests.benchmarks.peers.test_comparison import document


def test_four_and_sixteen_streams_run_beside_prompts_of_1500_and_3000_words() -> None:
    found = {(scenario.streams, scenario.long_prompt) for scenario in BESIDE.values()}
    assert found == {(4, 1500), (4, 3000), (16, 1500), (16, 3000)}


def test_every_server_has_a_line_for_each_load_with_what_is_missing_left_open() -> None:
    load = "beside-4-1500"
    found = document(
        chunkserve={f"{load}.gap_p50_ms": [60.0, 70.0, 65.0], f"{load}.long_ttft_ms": [2000.0]},
        vllm={f"{load}.gap_p99_ms": [400.0]},
    )
    found["scenarios"] = {load: dataclasses.asdict(BESIDE[load])}
    lines = beside.table(found).splitlines()
    assert lines[2] == "| 4 | 1,500 | chunkserve | 65 (60–70) | – | – | 2000 (2000–2000) |"
    assert lines[3] == "| 4 | 1,500 | vLLM | – | 400 (400–400) | – | – |"
    assert len(lines) == 4


def test_ours_are_divided_by_llama_cpps_and_held_to_the_aim_with_weights_as_stored() -> None:
    found = document(
        chunkserve_stored={"single.tpot_ms": [3.0], "closed.tokens_per_s": [400.0], "mixed.longest_gap_ms": [80.0]},
        chunkserve_no_drafts={"single.tpot_ms": [8.0], "closed.tokens_per_s": [600.0]},
        llama_cpp={"single.tpot_ms": [5.0], "closed.tokens_per_s": [100.0], "mixed.longest_gap_ms": [4000.0]},
    )
    text = llama_cpp.table(found)
    alone, clients, gap = (next(line for line in text.splitlines() if title in line) for title in (
        "alone: ms a token", "16 clients: tokens/s", "longest gap",
    ))  # fmt: skip
    assert "0.60 (0.60–0.60) | 1.60 (1.60–1.60) | ≤ 0.65: met |" in alone
    assert "4.00 (4.00–4.00) | 6.00 (6.00–6.00) | ≥ 5: missed |" in clients
    assert "0.020 (0.020–0.020) | – | ≤ 0.02: met |" in gap


def test_a_comparison_has_only_servers_that_can_be_started() -> None:
    assert {*beside.COMPARED, *llama_cpp.OURS, llama_cpp.LLAMA_CPP} <= set(SERVERS)
