"""The KV-tight benchmark runs on the fake executor: its document is complete, and what does not depend on a clock is
right."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.memory import COMPARED, Arrival, KvTight, cells, main
from engine.fake.executor import FakeExecutor
from tests.support.engines import resolved_config

RATIO = ("ratio", "ratio_scaled")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run the benchmark twice with one seed. All requests arrive at once, so only the times depend on the machine."""
    found = []
    for number in range(2):
        path: Path = tmp_path_factory.mktemp("bench") / f"{number}.json"
        load = ["--requests", "20", "--per-s", "1e9", "--max-tokens", "128", "--rounds", "2", "--seed", "5"]
        main(["--executor", "fake", *load, "--out", str(path)])
        found.append(json.loads(path.read_text()))
    return found


def test_the_last_line_is_one_document_with_a_cell_for_each_way_to_reserve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    main(
        ["--executor", "fake", "--requests", "6", "--per-s", "1000", "--rounds", "1", "--seed", "5", "--out", str(path)]
    )
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(lines[-1])
    assert document == json.loads(path.read_text())
    assert (document["benchmark"], document["seed"], document["rounds"]) == ("kv_tight", 5, 1)
    assert document["commit"] is not None
    assert document["cpu"]
    assert document["config"]["enable_prefix_caching"] is False, "the cache would hide what is computed again"
    reserved = [(cell["cell"], cell["scheduler"]["reserve_mode"]) for cell in document["cells"]]
    assert reserved == [
        ("full", "full"),
        ("learned", "learned"),
        ("ratio", "ratio"),
        ("ratio_scaled", "ratio"),
        ("prompt", "prompt"),
    ]
    for cell in document["cells"]:
        assert 0 < cell["gap_p50_ms"][0] <= cell["gap_p99_ms"][0] <= cell["gap_max_ms"][0]
        assert 0 < cell["ttft_p50_ms"][0] <= cell["ttft_p99_ms"][0]
        assert cell["wall_s"][0] > 0
    for base, figures in COMPARED.items():
        ratios = document["ratios"][f"to_{base}"]
        assert set(ratios) == {"full", "learned", "ratio", "ratio_scaled", "prompt"} - {base}
        assert all(set(found) == set(figures) for found in ratios.values())


def test_every_answer_has_its_scripted_length_and_every_pool_was_tight(documents: list[dict[str, Any]]) -> None:
    for document in documents:
        for cell in document["cells"]:
            assert cell["errors"] == [0, 0, 0]
            assert cell["valid"]
            assert cell["memory_deferrals"][1] > 0


def test_whole_lives_are_never_preempted_and_prompts_alone_are_in_a_tight_pool(documents: list[dict[str, Any]]) -> None:
    found = {cell["cell"]: cell for cell in documents[0]["cells"]}
    assert found["full"]["retractions_per_request"] == found["full"]["recomputed_tokens"] == [0, 0, 0]
    assert found["prompt"]["retractions_per_request"][1] > 0
    assert 0 < found["prompt"]["recomputed_share"][1] < 1
    assert all(found[name]["recomputed_share"][0] <= found["prompt"]["recomputed_share"][0] for name in RATIO)


def test_each_token_is_computed_once_and_only_preemptions_compute_it_again(documents: list[dict[str, Any]]) -> None:
    """The last token of an answer is never fed back. For a cell without preemptions the figure is exactly the load's
    own."""
    for document in documents:
        once = {
            tuple(a - b for a, b in zip(cell["computed_tokens"], cell["recomputed_tokens"], strict=True))
            for cell in document["cells"]
            if cell["recomputed_tokens"][2] == 0
        }
        assert len(once) == 1


def test_one_seed_gives_one_schedule(documents: list[dict[str, Any]]) -> None:
    timeless = (
        "retractions_per_request",
        "computed_tokens",
        "recomputed_tokens",
        "peak_held_share",
        "memory_deferrals",
    )
    first, second = ([[cell[name] for name in timeless] for cell in document["cells"]] for document in documents)
    assert first == second


@pytest.mark.parametrize(("blocks", "tight"), [(12, True), (200, False)])
def test_a_cell_whose_pool_held_everybody_is_not_valid(blocks: int, tight: bool) -> None:
    arrivals = [Arrival(0.0, tuple(range(2, 18)), 24, 8) for _ in range(6)]
    config = resolved_config(num_kv_blocks=blocks, enable_prefix_caching=False, scheduler=cells(24)["full"])
    executor = FakeExecutor(blocks, config.block_size, range(32), verify_prefix=True)
    figures = KvTight(executor, config, arrivals).run()
    assert (figures["valid"], figures["errors"]) == (tight, 0)


def test_a_wait_for_a_seat_is_not_a_wait_for_memory() -> None:
    arrivals = [Arrival(0.0, tuple(range(2, 18)), 24, 8) for _ in range(6)]
    config = resolved_config(num_kv_blocks=200, enable_prefix_caching=False, scheduler=cells(24)["full"])
    config = dataclasses.replace(config, max_num_seqs=2)
    figures = KvTight(FakeExecutor(200, config.block_size, range(32)), config, arrivals).run()
    assert figures["memory_deferrals"] == 0
    assert not figures["valid"]


def test_the_scripted_stop_token_ends_no_answer_before_its_time() -> None:
    """Every token of this executor is the stop token, so only the script can decide when an answer ends."""
    arrivals = [Arrival(0.0, tuple(range(2, 18)), 24, length) for length in (2, 5, 23)]
    config = resolved_config(num_kv_blocks=200, enable_prefix_caching=False, scheduler=cells(24)["full"])
    figures = KvTight(FakeExecutor(200, config.block_size, [0]), config, arrivals).run()
    assert figures["errors"] == 0
    assert figures["computed_tokens"] == 3 * 16 + 1 + 4 + 22, "the stop token is sampled and not fed back"
