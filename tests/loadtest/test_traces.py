"""Traces of real loads: read as their formats define them, and scaled without losing their character."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from loadtest.arrivals import cv_of
from loadtest.traces import BadTrace, Row, Trace, prompt_of, read_trace, scaled

SAMPLES = Path(__file__).parent / "traces"
AZURE, MOONCAKE = SAMPLES / "azure_sample.csv", SAMPLES / "mooncake_sample.jsonl"
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
SHARED = Path(os.environ.get("CHUNKSERVE_DATA", Path(__file__).parents[3] / "shared" / "data")) / "traces"


def trace_of(tmp_path: Path, name: str, contents: str) -> Trace:
    path = tmp_path / name
    path.write_text(contents)
    return read_trace(path)


def test_azures_rows_have_times_to_the_microsecond_and_lengths(tmp_path: Path) -> None:
    rows = "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    found = trace_of(tmp_path, "a.csv", HEAD + rows)
    assert found.rows[0] == Row(0.0, 4808, 10)
    assert found.rows[1].at_s == pytest.approx(0.052)


def test_mooncakes_rows_have_milliseconds_and_blocks(tmp_path: Path) -> None:
    rows = (
        '{"timestamp": 1500, "input_length": 513, "output_length": 5, "hash_ids": [3, 9]}\n'
        '{"timestamp": 500, "input_length": 512, "output_length": 2, "hash_ids": [3]}\n'
    )
    found = trace_of(tmp_path, "m.jsonl", rows)
    assert found.rows == (Row(0.0, 512, 2, (3,)), Row(1.0, 513, 5, (3, 9)))  # in the order of time


PLAIN = "arrival_s,prompt_tokens,answer_tokens\n"


def test_plain_rows_are_the_same_in_both_forms_and_begin_at_any_time(tmp_path: Path) -> None:
    rows = trace_of(tmp_path, "p.csv", PLAIN + "7.5,30,4\n5,20,3\n").rows
    assert rows == (Row(0.0, 20, 3), Row(2.5, 30, 4))
    lines = (
        '{"arrival_s": 7.5, "prompt_tokens": 30, "answer_tokens": 4}\n'
        '{"arrival_s": 5, "prompt_tokens": 20, "answer_tokens": 3, "more": null}\n'
    )
    assert trace_of(tmp_path, "p.jsonl", lines).rows == rows


@pytest.mark.parametrize("sample", [AZURE, MOONCAKE, SAMPLES / "plain_sample.csv"])
def test_a_packed_trace_is_the_same(sample: Path, tmp_path: Path) -> None:
    packed = tmp_path / f"{sample.name}.gz"
    packed.write_bytes(gzip.compress(sample.read_bytes()))
    assert read_trace(packed) == read_trace(sample)


@pytest.mark.parametrize(
    ("name", "contents", "reason"),
    [
        ("a.txt", "", "a trace is"),
        ("a.csv", "", "line 1"),
        ("a.csv", "time,in,out\n", "line 1"),
        ("a.csv", HEAD, "no requests"),
        ("a.csv", HEAD + "2023-11-16 18:17:03,5\n", "line 2"),
        ("a.csv", HEAD + "2023-11-16 18:17:03,5,6\nnever,5,6\n", "line 3"),
        ("a.csv", HEAD + "2023-11-16 18:17:03,-5,6\n", "line 2"),
        ("p.csv", PLAIN + "0,5,6\n1,,6\n", "line 3"),
        ("p.csv", PLAIN + "0,5,6\ninf,5,6\n", "line 3: a time of inf s"),
        ("p.jsonl", '{"arrival_s": 0, "prompt_tokens": 5}\n', "line 1: KeyError"),
        ("a.jsonl", '{"timestamp": 0}\n', "line 1"),
        ("a.jsonl", "[]\n", "line 1"),
        ("a.jsonl", "{\n", "line 1"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}\n', "1 hash_ids"),
        ("a.csv.gz", HEAD, "a.csv.gz"),
        ("p.jsonl", '{"arrival_s": 0, "prompt_tokens": 1e400, "answer_tokens": 1}\n', "line 1: OverflowError"),
        ("p.jsonl", f'{{"arrival_s": {10**400}, "prompt_tokens": 1, "answer_tokens": 1}}\n', "line 1: OverflowError"),
        ("p.jsonl", f'{{"arrival_s": 0, "prompt_tokens": {10**400}, "answer_tokens": 1}}\n', "line 1: .* more than"),
        ("p.jsonl", "[" * 100_000, "line 1: RecursionError"),
        ("p.csv", PLAIN + f"0,1,{10**400}\n", "line 2: a length of more than"),
        ("p.csv", PLAIN + f"0,1,1\n1,1,{'1' * 200_000}\n", "line 3: field larger than field limit"),
    ],
)
def test_a_file_that_is_no_trace_is_named_with_the_line(tmp_path: Path, name: str, contents: str, reason: str) -> None:
    with pytest.raises(BadTrace, match=reason):
        trace_of(tmp_path, name, contents)


def test_a_packed_trace_that_is_damaged_inside_is_named(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(AZURE.read_bytes()))
    packed[12:200] = b"\xff" * 188
    (tmp_path / "a.csv.gz").write_bytes(packed)
    with pytest.raises(BadTrace, match=r"a\.csv\.gz: Error -3"):
        read_trace(tmp_path / "a.csv.gz")


# --- scaling --------------------------------------------------------------------------------------------------------


def test_a_rate_stretches_all_gaps_alike_so_that_bursts_stay_bursts() -> None:
    before = read_trace(AZURE)
    after = scaled(before, rate=10.0)
    assert (len(after.rows) - 1) / after.seconds == pytest.approx(10.0)
    assert cv_of([row.at_s for row in after.rows]) == pytest.approx(cv_of([row.at_s for row in before.rows]))


def test_a_rate_is_that_of_the_requests_that_are_sent() -> None:
    """A trace of which half was too long was once sent at half the rate."""
    after = scaled(read_trace(AZURE), rate=10.0, longest=800)
    assert after.left_out
    assert (len(after.rows) - 1) / after.seconds == pytest.approx(10.0)


def test_what_is_longer_than_the_server_takes_is_left_out_and_counted() -> None:
    before = read_trace(AZURE)
    after = scaled(before, longest=800)
    fit = [row for row in before.rows if row.prompt_tokens + row.output_tokens <= 800]
    assert 0 < len(fit) < len(before.rows)
    assert [row.prompt_tokens for row in after.rows] == [row.prompt_tokens for row in fit]
    assert after.left_out == len(before.rows) - len(fit)


def test_lengths_are_scaled_and_sharing_stays() -> None:
    before = read_trace(MOONCAKE)
    after = scaled(before, lengths=0.125)
    assert after.block_tokens == 64
    assert [row.blocks for row in after.rows] == [row.blocks for row in before.rows]
    for old, new in zip(before.rows, after.rows, strict=True):
        assert new.prompt_tokens == max(round(old.prompt_tokens / 8), 1)
        assert new.output_tokens >= 1


def test_seconds_cut_the_trace_after_stretching() -> None:
    after = scaled(read_trace(AZURE), rate=5.0, seconds=2.0)
    assert 0 < len(after.rows) < 40
    assert all(row.at_s < 2.0 for row in after.rows)


@pytest.mark.parametrize("given", [{"rate": 0.0}, {"lengths": -1.0}, {"seconds": float("inf")}, {"longest": 1}])
def test_a_scale_that_leaves_nothing_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        scaled(read_trace(AZURE), **given)  # type: ignore[arg-type]


# --- prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [1.0, 0.1, 0.03])
def test_prompts_are_as_long_as_the_trace_says_and_share_what_it_says(lengths: float) -> None:
    trace = scaled(read_trace(MOONCAKE), lengths=lengths)
    prompts = [prompt_of(row, i, trace.block_tokens, seed=1).split() for i, row in enumerate(trace.rows)]
    assert [len(prompt) for prompt in prompts] == [row.prompt_tokens for row in trace.rows]
    shared_any = 0
    for i, (one, words) in enumerate(zip(trace.rows, prompts, strict=True)):
        for other, others in zip(trace.rows[:i], prompts[:i], strict=True):
            blocks = next((k for k, (a, b) in enumerate(zip(one.blocks, other.blocks, strict=False)) if a != b), 1)
            tokens = blocks * trace.block_tokens
            if one.blocks[0] == other.blocks[0] and tokens <= min(len(words), len(others)):
                assert words[:tokens] == others[:tokens]
                shared_any += 1
    assert shared_any > 20


def test_prompts_without_ids_share_nothing() -> None:
    rows = [Row(0.0, 50, 1), Row(1.0, 50, 1)]
    first, second = (prompt_of(row, i, 512, seed=1) for i, row in enumerate(rows))
    assert first.split()[:8] != second.split()[:8]


def test_another_seed_has_other_prompts_so_that_no_run_finds_the_last_ones_cache() -> None:
    row = read_trace(MOONCAKE).rows[0]
    assert prompt_of(row, 0, 512, seed=1) == prompt_of(row, 0, 512, seed=1) != prompt_of(row, 0, 512, seed=2)


def test_the_ideal_hit_share_is_of_blocks_whose_prefix_was_seen() -> None:
    rows = (Row(0, 1024, 1, (1, 2)), Row(1, 1024, 1, (1, 3)), Row(2, 1024, 1, (4, 2)), Row(3, 1536, 1, (1, 3, 2)))
    assert Trace(rows).ideal_hit_share == pytest.approx((0 + 1 + 0 + 2) / 9)
    assert Trace((Row(0, 5, 1),)).ideal_hit_share == 0.0


# --- the real ones --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"the traces are not at {SHARED}; CHUNKSERVE_DATA names another folder")
@pytest.mark.parametrize(
    ("name", "requests", "mean_prompt", "mean_output", "hits"),
    [
        ("azure23_conv.csv", 19_366, 1155, 211, 0.0),
        ("azure23_code.csv", 8_819, 2048, 28, 0.0),
        ("mooncake_conv.jsonl.gz", 12_031, 12_035, 343, 0.366),
        ("mooncake_synth.jsonl.gz", 3_993, 15_325, 149, 0.64),
    ],
)
def test_the_published_traces_are_read_whole(
    name: str, requests: int, mean_prompt: int, mean_output: int, hits: float
) -> None:
    found = read_trace(SHARED / name)
    assert len(found.rows) == requests
    assert sum(row.prompt_tokens for row in found.rows) / requests == pytest.approx(mean_prompt, rel=0.01)
    assert sum(row.output_tokens for row in found.rows) / requests == pytest.approx(mean_output, rel=0.01)
    assert found.ideal_hit_share == pytest.approx(hits, abs=0.01)
