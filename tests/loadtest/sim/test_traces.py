"""Traces are read as their publishers wrote them, and the jobs made of them are what the traces say."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from loadtest.sim.executor import FILLER
from loadtest.sim.traces import TraceMissingError, trace_jobs
from loadtest.sim.workload import Job, thinned, window


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHUNKSERVE_DATA", str(tmp_path))
    folder = tmp_path / "traces"
    folder.mkdir()
    return folder


def test_azures_seven_digits_of_a_second_are_read(traces: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.5000000,374,44\n2023-11-17 00:00:01.7500000,0,0\n"
    )
    (traces / "azure23_conv.csv").write_text(text)
    assert trace_jobs("azure_conv") == [Job(0.0, 374, 44), Job(2.25, 1, 1)]


def test_mooncakes_hash_ids_become_shared_heads_of_prompts(traces: Path) -> None:
    rows = [
        {"timestamp": 500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [0, 4]},
    ]
    with gzip.open(traces / "mooncake_conv.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    first, second = trace_jobs("mooncake_conv")
    assert (first.arrival_s, second.arrival_s) == (0.0, 0.5)
    one, other = first.prompt(0), second.prompt(1)
    assert (len(one), len(other)) == (600, 1100)
    assert one[:512] == other[:512]
    assert one[512] != other[512]


def test_a_trace_that_is_not_there_is_named(traces: Path) -> None:
    with pytest.raises(TraceMissingError, match=r"azure_code is not at .*CHUNKSERVE_DATA"):
        trace_jobs("azure_code")


def test_prompts_without_hash_ids_differ_from_their_first_token_on() -> None:
    one, other = Job(0, 5, 1).prompt(0), Job(0, 5, 1).prompt(1)
    assert one[0] != other[0]
    assert one[1:] == (FILLER,) * 4


@pytest.mark.parametrize("bad", [(0, 5, ()), (5, 0, ()), (600, 5, (1,)), (512, 5, (1, 2))])
def test_a_job_that_cannot_be_is_refused(bad: tuple[int, int, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError):
        Job(0.0, *bad)


def test_a_share_of_a_trace_is_drawn_by_seed_and_a_window_begins_at_zero() -> None:
    jobs = [Job(float(i), 1, 1) for i in range(1000)]
    assert thinned(jobs, 0.3, seed=1) == thinned(jobs, 0.3, seed=1) != thinned(jobs, 0.3, seed=2)
    assert 230 < len(thinned(jobs, 0.3, seed=1)) < 370
    assert [job.arrival_s for job in window(jobs, 10, 13)] == [0.0, 1.0, 2.0]
