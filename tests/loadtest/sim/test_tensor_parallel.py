"""What several GPUs with one model take, against figures that were worked out by hand, and against one measured GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.tensor_parallel.run import GPU, check
from engine.step import RowKind, RowSampling, ScheduledRequest, StepPlan
from loadtest.sim.tensor_parallel import LLAMA_8B, LLAMA_70B, QWEN3_06B, Ranks, Row, Shape

LAYER = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
"""Query and output, key and value, and the three matrices of the MLP."""
HEAD = 128256 * 8192
EIGHT = Ranks(LLAMA_70B, 8)
SAMPLED = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def row(kind: RowKind, start: int, count: int, *, samples: bool = True) -> ScheduledRequest:
    return ScheduledRequest("r", kind, start, (1,) * count, (0,), SAMPLED if samples else None)


# --- weights and memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "weights"),
    [(LLAMA_70B, 70_553_706_496), (LLAMA_8B, 8_030_261_248), (QWEN3_06B, 596_049_920 - 28 * 2 * 128)],
)
def test_a_shape_has_as_many_weights_as_the_published_model(shape: Shape, weights: int) -> None:
    """Qwen3 also has norms of each layer's queries and keys, which are left out."""
    assert shape.matrix_weights + shape.norm_weights == weights


def test_a_rank_holds_its_part_of_matrices_and_all_norms() -> None:
    assert EIGHT.weight_bytes == (80 * LAYER + 2 * HEAD) * 2 / 8 + 161 * 8192 * 2


def test_kv_fills_what_the_weights_leave_and_each_rank_holds_its_heads_of_every_token() -> None:
    """The easy mistake is to divide tokens among the ranks, too."""
    left = 0.9 * 139 * 2**30 - 4 * 2**30 - 17_640_734_720
    assert EIGHT.kv_tokens == int(left / (2 * 2 * 128 * 80)) == 2_743_881


def test_where_the_weights_fill_the_card_no_token_fits() -> None:
    assert Ranks(LLAMA_70B, 1).kv_tokens == 0


def test_weights_of_one_byte_take_half_as_much() -> None:
    narrow = Ranks(replace(LLAMA_70B, bytes_a_weight=1.0), 2)
    assert narrow.weight_bytes == pytest.approx(EIGHT.weight_bytes * 2, rel=1e-3)
    assert narrow.kv_tokens > Ranks(LLAMA_70B, 2).kv_tokens


@pytest.mark.parametrize(("size", "said"), [(16, "kv_heads is 8"), (3, "heads is 64"), (0, "a size of 0")])
def test_a_size_that_does_not_share_equally_is_refused_by_what_it_does_not_share(size: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Ranks(LLAMA_70B, size)


# --- sums -------------------------------------------------------------------------------------------------------------


def test_a_step_adds_up_after_attention_and_mlp_of_each_layer_and_after_the_embedding() -> None:
    assert EIGHT.num_sums == 2 * 80 + 1
    assert Ranks(LLAMA_70B, 1).num_sums == 0


def test_few_tokens_are_read_from_all_others_at_once() -> None:
    found = EIGHT.all_reduce(1)
    assert (found.way, found.sent) == ("one-shot", 7 * 8192 * 2)
    assert found.seconds == pytest.approx(10e-6 + 7 * 8192 * 2 / 360e9)


def test_many_tokens_are_added_up_by_shares_in_two_rounds() -> None:
    found = EIGHT.all_reduce(64)
    assert (found.way, found.sent) == ("two-shot", 2 * 7 / 8 * 64 * 8192 * 2)
    assert found.seconds == pytest.approx(20e-6 + 1_835_008 / 360e9)


def test_two_ranks_send_as_much_either_way_and_so_need_one_round() -> None:
    assert {Ranks(LLAMA_70B, 2).all_reduce(tokens).way for tokens in (1, 64, 8192)} == {"one-shot"}


def test_logits_of_all_ranks_but_one_go_to_the_one_that_samples() -> None:
    assert EIGHT.gather_s(64) == pytest.approx(10e-6 + 64 * 128256 * 4 * 7 / 8 / 360e9)
    assert EIGHT.gather_s(0) == Ranks(LLAMA_70B, 1).gather_s(64) == 0.0


# --- steps ------------------------------------------------------------------------------------------------------------


def test_a_decode_step_of_one_stream_is_what_its_parts_add_up_to() -> None:
    layers = 80 * (LAYER * 2 / 8 / 4.224e12 + 24e-6)
    head = HEAD * 2 / 8 / 4.224e12
    keys = 1025 * 327_680 / 8 / 3.744e12
    sums = 161 * (10e-6 + 7 * 16_384 / 360e9)
    gather = 10e-6 + 128256 * 4 * 7 / 8 / 360e9
    assert EIGHT.decode_s(1, 1024) == pytest.approx(layers + head + keys + sums + gather)
    assert EIGHT.decode_s(1, 1024) == pytest.approx(7.72e-3, rel=1e-3)


def test_a_long_prompt_is_bound_by_its_products() -> None:
    layers = 80 * (2 * LAYER * 8192 / 8 / 613.18e12 + 24e-6)
    head = HEAD * 2 / 8 / 4.224e12
    attention = 4 * (8192 * 8193 // 2) * 8192 * 80 / 8 / 445.05e12
    assert EIGHT.computing_s([Row(0, 8192)], samples=1) == pytest.approx(layers + head + attention)


def test_a_planned_step_takes_what_its_rows_do() -> None:
    plan = StepPlan(0, (row(RowKind.DECODE, 1024, 1), row(RowKind.LAST, 0, 100)))
    assert EIGHT.seconds(plan) == EIGHT.step_s([Row(1024, 1), Row(0, 100)], samples=2)


def test_a_chunk_that_samples_nothing_reads_no_lm_head_and_gathers_nothing() -> None:
    chunk, last = (
        EIGHT.seconds(StepPlan(0, (row(kind, 0, 512, samples=samples),)))
        for kind, samples in ((RowKind.MIDDLE, False), (RowKind.LAST, True))
    )
    assert last - chunk == pytest.approx(HEAD * 2 / 8 / 4.224e12 + EIGHT.gather_s(1))


@pytest.mark.parametrize("streams", [1, 16, 64, 256])
def test_more_ranks_are_faster_and_never_as_many_times_as_there_are(streams: int) -> None:
    took = [Ranks(LLAMA_70B, size).decode_s(streams, 1024) for size in (1, 2, 4, 8)]
    assert all(more < fewer < 2 * more for fewer, more in pairwise(took))


def test_steps_of_one_card_are_within_an_eighth_of_those_that_were_measured() -> None:
    """The shares of the rates were chosen by the 8B model; the 0.6B model, whose matrices are smaller than a rank's of
    a 70B model, had no part in it."""
    cells = list(check(json.loads(GPU.read_text(encoding="utf-8"))))
    assert len(cells) == 20
    assert all(abs(cell["said_ms"] / cell["measured_ms"] - 1) < 0.125 for cell in cells)
