"""Contracts of the captured sizes: every step that an engine can plan fits one, with a reasonable amount of padding.
Needs no GPU: nothing is captured here."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import ConfigError
from engine.execution.gpu.cuda_graph_buckets import Bucket, Buckets, LaunchCost, plan_buckets


def planned(scope: Any = "all", *, seqs: int = 64, tokens: int = 512, **sizes: Any) -> Buckets:
    return plan_buckets(scope, max_num_seqs=seqs, max_num_batched_tokens=tokens, **sizes)


@st.composite
def engines(draw: st.DrawFn) -> tuple[int, int]:
    seqs = draw(st.integers(1, 700))
    return seqs, draw(st.integers(seqs + 1, 20_000))


@given(engines(), st.data())
def test_every_step_that_an_engine_can_plan_fits_the_smallest_bucket_that_holds_it(
    engine: tuple[int, int], data: st.DataObject
) -> None:
    seqs, tokens = engine
    buckets = planned(seqs=seqs, tokens=tokens)
    num_rows = data.draw(st.integers(1, seqs))
    num_tokens = data.draw(st.integers(num_rows, tokens))
    found = buckets.find(num_tokens=num_tokens, num_rows=num_rows, decode=False)
    assert isinstance(found, Bucket)
    fitting = [
        other
        for other in buckets.all
        if not other.decode and other.num_tokens >= num_tokens and other.num_rows >= num_rows
    ]
    assert found == min(fitting, key=lambda bucket: (bucket.num_tokens, bucket.num_rows))
    assert found.num_tokens - num_tokens < max(64, num_tokens / 4), "a large chunk's padding is work like its tokens"


def test_with_adapters_every_size_is_there_twice_and_a_step_finds_its_own_kind() -> None:
    plain, both = planned(), planned(adapters=True)
    assert [bucket for bucket in both.all if not bucket.adapters] == list(plain.all)
    assert {(bucket.name, bucket.decode) for bucket in both.all if bucket.adapters} == {
        (f"{bucket.name} with adapters", bucket.decode) for bucket in plain.all
    }
    for decode in (False, True):
        for adapters in (False, True):
            found = both.find(num_tokens=5, num_rows=5, decode=decode, adapters=adapters)
            assert isinstance(found, Bucket)
            assert (found.decode, found.adapters) == (decode, adapters)
            assert found in both.all
    assert planned("decode", adapters=True).adapters


def test_the_sizes_of_mixed_steps_are_few() -> None:
    sizes = planned(tokens=8192).mixed_tokens
    assert sizes[:13] == (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280)
    assert (len(sizes), sizes[-2:]) == (24, (7168, 8192))
    assert len(planned(tokens=16384).mixed_tokens) == 28


@given(st.integers(1, 2000), st.data())
def test_every_batch_of_decode_rows_fits_a_decode_bucket_of_little_padding(seqs: int, data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, seqs))
    found = planned("decode", seqs=seqs, tokens=seqs + 1).find(num_tokens=num_rows, num_rows=num_rows, decode=True)
    assert isinstance(found, Bucket)
    assert found.decode
    assert num_rows <= found.num_rows == found.num_tokens <= max(num_rows + 7, num_rows * 17 / 16 + 8)


@given(engines())
def test_the_largest_capture_comes_first_and_none_twice(engine: tuple[int, int]) -> None:
    found = planned(seqs=engine[0], tokens=engine[1]).all
    assert len(set(found)) == len(found)
    assert [bucket.num_tokens for bucket in found] == sorted((bucket.num_tokens for bucket in found), reverse=True)


def test_a_last_chunk_of_one_token_alone_is_no_decode_step() -> None:
    found = planned().find(num_tokens=1, num_rows=1, decode=False)
    assert found == Bucket(64, 8, False)
    assert planned().find(num_tokens=1, num_rows=1, decode=True) == Bucket(1, 1, True)


def test_steps_whose_launches_are_hidden_behind_their_work_have_no_bucket() -> None:
    """8,192 tokens take 160 ms: 1,024 take 20, four times as long as the host launches them."""
    found = planned(tokens=8192).without_hidden_launches(LaunchCost(5.0, 160.0, 8192))
    assert found.mixed_tokens == (64, 128, 192, 256, 320, 384, 448, 512)
    assert found.find(num_tokens=512, num_rows=5, decode=False) == Bucket(512, 8, False)
    assert found.find(num_tokens=513, num_rows=5, decode=False) == "more than 512 tokens"
    assert found.decode_rows == planned(tokens=8192).decode_rows


@pytest.mark.parametrize("cost", [LaunchCost(5.0, 9.9, 512), LaunchCost(5.0, 0.0, 512)], ids=["slow host", "no time"])
def test_where_launches_are_not_hidden_every_size_stays(cost: LaunchCost) -> None:
    assert planned().without_hidden_launches(cost) == planned()


def test_the_smallest_size_stays_however_slow_the_device_is() -> None:
    assert planned().without_hidden_launches(LaunchCost(1.0, 9e9, 512)).mixed_tokens == (64,)


def test_what_no_bucket_holds_is_a_miss_with_its_reason() -> None:
    buckets = planned(seqs=4, tokens=100)
    assert buckets.find(num_tokens=5, num_rows=5, decode=True) == "more than 4 decode rows"
    assert buckets.find(num_tokens=101, num_rows=1, decode=False) == "more than 100 tokens"
    assert buckets.find(num_tokens=50, num_rows=5, decode=False) == "more than 4 rows"
    assert planned("decode").find(num_tokens=50, num_rows=5, decode=False) == "prefill rows or drafts"


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"decode_rows": [1, 8, 32]}, "cuda_graph_decode_rows ends at 32, but max_num_seqs is 64"),
        ({"mixed_tokens": [256]}, "cuda_graph_mixed_tokens ends at 256, but max_num_batched_tokens is 512"),
        ({"mixed_rows": [8]}, "cuda_graph_mixed_rows ends at 8, but max_num_seqs is 64"),
        ({"decode_rows": []}, r"cuda_graph_decode_rows is \[\]"),
        ({"decode_rows": [0, 64]}, r"cuda_graph_decode_rows is \[0, 64\]"),
        ({"mixed_tokens": [512, 512]}, "each larger than the one before"),
        ({"mixed_tokens": [600, 512]}, "each larger than the one before"),
        ({"decode_rows": [64, 128]}, "cuda_graph_decode_rows has 128, but max_num_seqs is 64: .* larger than 64"),
    ],
)
def test_sizes_that_leave_a_hole_or_are_for_no_step_are_refused(sizes: dict[str, list[int]], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        planned(**sizes)


def test_sizes_that_are_asked_for_are_the_ones_there_are() -> None:
    found = planned(decode_rows=[3, 64], mixed_tokens=[100, 512], mixed_rows=[64])
    assert [bucket.name for bucket in found.all] == ["mixed 512x64", "mixed 100x64", "decode 64", "decode 3"]
    assert planned("none").all == ()
