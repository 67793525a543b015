"""The study of tensor parallel: what its kept file says is what its program still finds."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.tensor_parallel.layouts import CARDS, RATES, SEEDS, SIZES, run_layout
from benchmarks.tensor_parallel.run import LLAMA_70B, RANKS, on_paper
from benchmarks.tensor_parallel.tables import TABLES
from benchmarks.tensor_parallel.ways import Pipeline, pipeline, tensor_parallel
from loadtest.sim.tensor_parallel import INFINIBAND, NVLINK, Ranks

ROOT = Path(__file__).parents[3]
KEPT = ROOT / "loadtest" / "results" / "tensor_parallel.json"
PAGE = ROOT / "docs" / "benchmarks" / "tensor-parallel.md"


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("mark", [mark for mark in TABLES if mark != "tensor parallel loads"])
def test_what_is_kept_of_the_arithmetic_is_what_the_arithmetic_says(mark: str, kept: dict[str, Any]) -> None:
    assert TABLES[mark](kept) == TABLES[mark](on_paper())


@pytest.mark.parametrize("mark", TABLES)
def test_the_page_has_every_table_as_the_file_says_it(mark: str, kept: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(f"<!-- {mark} -->")[2].partition(f"<!-- end of {mark} -->")[0].strip() == TABLES[mark](kept)


def test_what_the_page_says_of_layouts_is_what_the_file_says(kept: dict[str, Any]) -> None:
    def mean(rate: float, size: int, name: str) -> float:
        return fmean(cell[name] for cell in kept["loads"] if (cell["rate"], cell["size"]) == (rate, size))

    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    for said in (
        f"after {mean(2, 8, 'ttft_p50_ms'):.0f} ms in the median instead of {mean(2, 2, 'ttft_p50_ms'):.0f}",
        f"{mean(2, 8, 'tpot_p50_ms'):.1f} ms a token instead of {mean(2, 2, 'tpot_p50_ms'):.1f}",
        f"with {100 * mean(11, 8, 'good_share'):.1f} % good answers",
        f"four of two have {100 * mean(11, 2, 'good_share'):.1f} %",
    ):
        assert said in text, said
    assert max(SIZES, key=lambda size: mean(8, size, "good_share")) == 4


def test_every_layout_has_every_load_once(kept: dict[str, Any]) -> None:
    found = [(cell["size"], cell["rate"], cell["seed"]) for cell in kept["loads"]]
    assert sorted(found) == sorted((size, rate, seed) for size in SIZES for rate in RATES for seed in SEEDS)
    assert all(cell["size"] * cell["replicas"] == CARDS for cell in kept["loads"])


def test_a_simulated_load_is_the_same_each_time_and_large_replicas_answer_an_idle_one_sooner() -> None:
    large, again, small = (run_layout(LLAMA_70B, size, 2.0, 5, seconds=2.0) for size in (8, 8, 2))
    assert large == again
    assert large["ttft_p50_ms"] < small["ttft_p50_ms"]
    assert large["tpot_p50_ms"] < small["tpot_p50_ms"]


# --- pipelines --------------------------------------------------------------------------------------------------------


def test_a_streams_token_passes_all_stages_of_a_pipeline() -> None:
    """One stream is no faster than with one card: the weights are read one stage after the other."""
    gap_s = Pipeline(LLAMA_70B, 8, NVLINK).gap_s(1, 1024)
    assert gap_s > Ranks(LLAMA_70B).decode_s(1, 1024)


def test_streams_go_through_a_pipeline_in_groups() -> None:
    one = Pipeline(LLAMA_70B, 4, NVLINK)
    assert one.gap_s(64, 1024) == pytest.approx(4 * (one.stage.decode_s(16, 1024) + one.send_s(16)))
    assert one.stage.shape.layers == 20


def test_a_stage_hands_on_each_tokens_hidden_state_once() -> None:
    assert Pipeline(LLAMA_70B, 2, INFINIBAND).send_s(2048) == pytest.approx(25e-6 + 2048 * 8192 * 2 / 40e9)


@pytest.mark.parametrize("cards", RANKS[1:])
def test_between_nodes_a_pipeline_reads_more_prompts_and_tensor_parallel_in_a_node_answers_sooner(cards: int) -> None:
    """What the page says of where pipelines win."""
    inside, across = tensor_parallel(LLAMA_70B, cards, NVLINK), tensor_parallel(LLAMA_70B, cards, INFINIBAND)
    stages = pipeline(LLAMA_70B, cards, INFINIBAND)
    assert stages.prompt[1] < inside.prompt[1] < across.prompt[1]
    assert inside.prompt[0] < stages.prompt[0] < across.prompt[0]
    assert all(inside.gap_s(streams, 1024) < stages.gap_s(streams, 1024) for streams in (1, 16, 64, 256))
    assert all(across.gap_s(streams, 1024) < stages.gap_s(streams, 1024) for streams in (1, 16, 64))
    assert stages.gap_s(256, 1024) < across.gap_s(256, 1024)
