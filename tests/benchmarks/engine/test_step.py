"""The benchmark prints one JSON document with every cell that was asked for, on any machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.engine import mixed as bench_mixed
from benchmarks.engine import speculation as bench_speculation
from benchmarks.engine import step as bench_step
from benchmarks.engine.mixed import MixedLoad, Traffic, percentile
from benchmarks.engine.speculation import ARMS, one_round
from benchmarks.engine.step import Reading, main, reading_table, table
from engine.config import EngineConfig, FakeConfig, ResolvedConfig, SpeculativeConfig
from engine.fake.executor import FakeExecutor
from engine.protocol import SamplingParams, Submission
from engine.step import ScheduledRequest
from tests.engine.build.test_engine import TINY
from tests.support.compiler import needs_compiler
from tests.support.engines import resolved_config


@needs_compiler
def test_the_last_line_is_one_document_with_a_cell_for_each_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.build.cpu.cpu_flags", lambda: frozenset({"avx512_vnni"}))
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "head_dim": 16}))
    arguments = ["--model", str(tmp_path), "--load-format", "dummy", "--context", "20", "--steps", "2", "--seed", "5"]
    kernels = ["native", "torch_cpu", "int8", "int8+rounded"]
    out = tmp_path / "out.json"
    main(
        [
            *arguments,
            "--rows",
            "1",
            "3",
            "--prefill",
            "16",
            "--loop",
            "3",
            "--rounds",
            "2",
            "--out",
            str(out),
            "--kernels",
            *kernels,
        ]
    )
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(out.read_text()) == document
    shapes = [(cell["step"], cell["size"], cell["kernels"]) for cell in document["cells"]]
    whats = [("decode", 1), ("decode", 3), ("prefill", 16)]
    assert shapes == [(*what, name) for what in whats for name in (*kernels, "products")]
    assert [loop["size"] for loop in document["loops"]] == [3, 3]
    assert all(0 < loop["python_percent"] < 100 for loop in document["loops"])
    assert len(table(document).splitlines()) == 2 + len(whats)
    assert all(0 < cell["ms_min"] <= cell["ms_p50"] <= cell["ms_max"] for cell in document["cells"])
    assert (document["seed"], document["config"]["max_model_len"]) == (5, 128)
    assert set(document["matrix_bytes"]) == {"native", "int8", "int8+rounded"}
    assert document["matrix_bytes"]["int8"] < document["matrix_bytes"]["native"]
    assert len(reading_table(document).splitlines()) == 2 + 3 + 1


def test_the_share_of_reading_alone_is_that_of_the_matrices_bytes() -> None:
    """200 MB in 8 ms are 25 GB/s, half of the 50 GB/s that 500 MB in 10 ms are."""
    times = {"ms_p50": 8.0, "ms_min": 7.0, "ms_max": 9.0}
    document = {
        "cells": [
            {"step": "decode", "size": 1, "kernels": "native", **times},
            {"step": "decode", "size": 4, "kernels": "native", **times, "ms_p50": 80.0},
        ],
        "reading": {"bytes": 500_000_000, "ms_p50": 10.0, "ms_min": 5.0, "ms_max": 20.0},
        "matrix_bytes": {"native": 200_000_000},
    }
    *_, native, alone = reading_table(document).splitlines()
    assert native == "| native | 200 | 8.0 (7.0–9.0) | 25.0 | 50% |"
    assert alone == "| reading alone | | | 50.0 (25.0–100.0) | 100% |"


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_all_of_the_memory_is_read(num_threads: int) -> None:
    reading = Reading(num_threads, mib=1)
    assert sum(part.nbytes for part in reading._parts) == reading.num_bytes == 1 << 20
    reading.step()


@needs_compiler
def test_the_loop_has_room_for_its_streams_whatever_else_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: with `--rows` as the last option, sixteen streams never had enough blocks at once, and the bench
    waited for ever."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "head_dim": 16}))
    arguments = ["--model", str(tmp_path), "--load-format", "dummy", "--kernels", "native", "--rounds", "1"]
    main([*arguments, "--context", "60", "--steps", "2", "--rows", "--prefill", "1", "--loop", "70"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [loop["size"] for loop in document["loops"]] == [70]


@needs_compiler
def test_steps_are_measured_with_adapters_too_where_they_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "head_dim": 16}))
    arguments = ["--model", str(tmp_path), "--load-format", "dummy", "--rounds", "1", "--context", "20", "--loop", "3"]
    main([*arguments, "--steps", "2", "--rows", "3", "--prefill", "16", "--loras", "2", "--lora-rank", "3"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    shapes = [(cell["step"], cell["size"], cell["kernels"]) for cell in document["cells"]]
    plain = [(*what, name) for what in (("decode", 3), ("prefill", 16)) for name in ("native", "torch_cpu", "products")]
    adapted = [(f"{kind}+lora", size, name) for kind, size, name in plain if name != "products"]
    assert shapes == [*plain, *adapted]
    assert [line.split(" | ")[0] for line in table(document).splitlines()[2:]] == [
        "| 3 streams decode",
        "| 16 tokens of a prompt",
        "| 3 streams decode, with adapters",
        "| 16 tokens of a prompt, with adapters",
    ]


TRAFFIC = Traffic(stream_prompt=48, stream_answer=1500, head_start=40, prompt_tokens=1500, every_s=0.02)


def test_the_mixed_load_runs_on_any_executor_and_says_if_it_measured_anything() -> None:
    """S1-R5: prompts that waited for a seat left the streams undisturbed, and the figures looked perfect."""
    config = resolved_config(max_model_len=4096, num_kv_blocks=4096, max_num_batched_tokens=64, max_prefill_tokens=64)
    for seats, valid in ((16, True), (TRAFFIC.streams, False)):
        executor = FakeExecutor(config.num_kv_blocks, config.block_size, range(32), config=FakeConfig(step_delay_ms=1))
        figures = MixedLoad(executor, dataclasses.replace(config, max_num_seqs=seats), seed=1, traffic=TRAFFIC).run()
        assert figures["valid"] is valid
        assert 0 < figures["gap_p50"] <= figures["gap_p99"] <= figures["gap_max"]
        assert figures["num_gap"] == figures.get("num_stall", 0) + figures.get("num_steady", 0)


def test_streams_that_end_before_the_last_prompt_are_no_valid_mixed_load() -> None:
    """Regression: on a fast card the streams ended first, and the last prompts disturbed nobody."""
    config = resolved_config(max_model_len=4096, num_kv_blocks=4096, max_num_batched_tokens=64, max_prefill_tokens=64)
    for answer, num_ended in ((1500, 0), (50, 4)):
        executor = FakeExecutor(config.num_kv_blocks, config.block_size, range(32))
        traffic = dataclasses.replace(TRAFFIC, stream_answer=answer, prompts=2, every_s=0.0)
        figures = MixedLoad(executor, config, seed=1, traffic=traffic).run()
        assert (figures["num_ended_early"], figures["valid"]) == (num_ended, num_ended == 0)


def test_what_came_before_the_prompts_is_not_counted_with_them() -> None:
    config = resolved_config(max_model_len=4096, num_kv_blocks=4096, max_num_batched_tokens=64, max_prefill_tokens=64)
    found = []
    for changes in ({}, {"warm_up": 3}, {"warm_up": 1, "alone_s": 0.05}):
        executor = FakeExecutor(config.num_kv_blocks, config.block_size, range(32))
        traffic = dataclasses.replace(TRAFFIC, stream_answer=4000, every_s=0.0, **changes)
        found.append(MixedLoad(executor, config, seed=1, traffic=traffic).run())
    assert found[0]["num_gap"] == found[1]["num_gap"] == found[2]["num_gap"]
    assert found[0]["num_alone"] >= TRAFFIC.streams * (TRAFFIC.head_start - 1)
    assert ["num_alone" in figures for figures in found] == [True, False, True]


def test_a_stream_that_fails_ends_the_mixed_load_and_is_no_good_figure() -> None:
    """S1-R6: a load tool counted streams that had failed as short successes."""
    config = resolved_config(max_model_len=4096, num_kv_blocks=4096, max_num_batched_tokens=64, max_prefill_tokens=64)

    def late_row_of_a_stream(row: ScheduledRequest) -> str | None:
        return "kernel fault" if row.request_id == "stream 0" and row.start > 100 else None

    executor = FakeExecutor(config.num_kv_blocks, config.block_size, range(32), failing=late_row_of_a_stream)
    with pytest.raises(RuntimeError, match="stream 0 failed: kernel fault"):
        MixedLoad(executor, config, seed=1, traffic=TRAFFIC).run()


def test_the_tools_of_the_cpu_ask_for_it_where_there_is_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: left to choose, the engine took the GPU, and then refused the CPU kernels that the tools had asked
    for."""
    asked: list[EngineConfig] = []

    class AskedError(Exception):
        pass

    def ask(model: Path, config: EngineConfig) -> None:
        asked.append(config)
        raise AskedError

    for module in (bench_step, bench_mixed, bench_speculation):
        monkeypatch.setattr(module, "create_executor", ask)
        monkeypatch.setattr(module, "prepare_model", lambda *_, **__: tmp_path)
        with pytest.raises(AskedError):
            module.main([])
    assert [config.device for config in asked] == ["cpu"] * 3


def test_percentiles_lie_between_the_nearest_ranks() -> None:
    assert [percentile([4, 1, 3, 2], share) for share in (0, 0.5, 1)] == [1, 2.5, 4]


def drafting_config() -> ResolvedConfig:
    settings = {"max_model_len": 512, "num_kv_blocks": 512, "max_num_batched_tokens": 64, "num_speculative_tokens": 3}
    return resolved_config(**settings, speculative=SpeculativeConfig(method="none", free_tokens=8))


def test_the_drafts_bench_serves_the_same_answers_with_each_setting() -> None:
    """Run on the scripted executor, with requests that prompt lookup does foresee."""
    config = drafting_config()
    reply = [3, 1, 4, 1, 5] * 40
    executors = {name: FakeExecutor(512, config.block_size, range(32), reply=reply, verifies=True) for name in ARMS}
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    requests = [Submission(str(number), (1, 2, 3, 4 + number), params) for number in range(3)]
    found = one_round(executors, config, requests)
    assert found["none"]["drafted"] == 0
    assert all(found[name]["accepted"] > 100 for name in ("ngram", "suffix"))
    assert all(cell["tokens_s"] > 0 for cell in found.values())


def test_an_answer_that_drafts_would_change_ends_the_drafts_bench() -> None:
    config = drafting_config()
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    request = Submission("a", (1, 2, 3), params)
    texts = {"none": range(32), "suffix": range(5)}
    executors = {name: FakeExecutor(512, config.block_size, text, verifies=True) for name, text in texts.items()}
    with pytest.raises(RuntimeError, match="suffix: the answers are not those of none"):
        one_round(executors, config, [request])
