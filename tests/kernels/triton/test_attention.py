"""Owns the comparison of Triton's paged attention with the reference, in edge cases, in the interpreter.
Never relies on slots that no row owns: they all hold NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from kernels.rows.step import PagedRows
from tests.kernels.rows import Case, paged_case
from tests.kernels.triton.cases import (
    POISON,
    TOLERANCE,
    attend,
    captured_plan,
    check_attention,
    close,
    place,
    plan_of,
    slow,
)

from kernels.triton.attention.attention import attention  # isort: skip
from kernels.triton.attention.kernel import DECODE_CONFIGS, attend_decodes  # isort: skip
from kernels.triton.attention.plan import AttentionPlan, prepare_attention  # isort: skip
from kernels.triton.attention.splits import MOST_SPLITS, num_splits  # isort: skip
from kernels.triton.attention.work import CHUNK_ITEMS, DECODE_ITEMS, UNLIMITED  # isort: skip

BLOCK = 16
SPLIT = 128
LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT, 2 * SPLIT + 1]
COUNTS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, slow(torch.bfloat16)])
def test_decode_rows_of_any_length_match_the_reference(device: str, dtype: torch.dtype) -> None:
    """All in one step: the shortest have keys in one split, and none in the further splits of the longest."""
    check_attention(paged_case([length - 1 for length in LENGTHS], [], kv_heads=1, dtype=dtype), device, split=SPLIT)


@pytest.mark.parametrize("length", [1, SPLIT, SPLIT + 1])
def test_a_decode_row_alone_matches_the_reference(device: str, length: int) -> None:
    check_attention(paged_case([length - 1], []), device, split=SPLIT)


@pytest.mark.parametrize("keys", [32, 64, 128])
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("window", [None, 100])
def test_decode_rows_match_the_reference_wherever_blocks_end_in_a_tile_of_keys(
    device: str, monkeypatch: pytest.MonkeyPatch, keys: int, block_size: int, window: int | None
) -> None:
    """A tile is in several blocks, is one, or is in one with others."""
    found = next(config for config in DECODE_CONFIGS if config.kwargs["BLOCK_N"] == keys)
    monkeypatch.setattr(attend_decodes, "configs", [found])
    case = paged_case([length - 1 for length in (*LENGTHS, 63, 64, 65, 1000)], [], block_size=block_size)
    check_attention(case, device, window=window, split=SPLIT)


def test_a_row_of_one_split_is_the_same_where_others_might_have_several(device: str) -> None:
    """In a captured step there is room for the partial results of longer rows, which these never use."""
    case = paged_case([SPLIT - 1, 3], [])
    long = replace(plan_of(case, device, SPLIT), max_length=2 * SPLIT, rows=None)
    assert torch.equal(attend(case, device, split=SPLIT), attend(case, device, plan=long))


@pytest.mark.parametrize("context", [0, BLOCK, 100, *map(slow, (1, BLOCK - 1, BLOCK + 1))])
def test_chunks_of_any_length_after_any_context_match_the_reference(device: str, context: int) -> None:
    check_attention(paged_case([], [(context, count) for count in COUNTS], kv_heads=1), device)


@pytest.mark.parametrize("count", [2, 9, slow(17), slow(50), slow(128)])
def test_a_chunk_on_a_context_of_several_splits_matches_the_reference(device: str, count: int) -> None:
    """At the edges of splits of 2 x SPLIT keys, which a chunk may cross. 50 tokens of 3 queries are three tiles; fewer
    are a suffix of a cached prefix, or a token and its unverified drafts."""
    lengths = [count, *(splits * 2 * SPLIT + more for splits in (1, 2) for more in (-1, 0, 1)), 6 * SPLIT + 7]
    chunks = [(length - count, count) for length in lengths]
    assert num_splits(lengths[-1], count, SPLIT) > 1
    check_attention(paged_case([], chunks, kv_heads=1), device, split=SPLIT)


@pytest.mark.parametrize("window", [1, 100, 2 * SPLIT, 5000])
@pytest.mark.parametrize("dtype", [torch.float16, slow(torch.float32)])
def test_a_window_of_split_chunks_matches_the_reference(device: str, window: int, dtype: torch.dtype) -> None:
    """Splits before the window of a chunk's first token have no items, and later ones none of some tokens' keys."""
    case = paged_case([600, 300], [(700, 9), (515, 40), (505, 20)], kv_heads=1, dtype=dtype)
    check_attention(case, device, window=window, split=SPLIT)


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 3), (4, 2), slow(7, 1), (20, 1)])
def test_split_chunks_of_every_gqa_ratio_match_the_reference(device: str, group: int, kv_heads: int) -> None:
    case = paged_case([300], [(255, 9), (250, 12)], group=group, kv_heads=kv_heads)
    check_attention(case, device, split=SPLIT)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_mixed_rows_match_the_reference(device: str, dtype: torch.dtype) -> None:
    chunks = [(0, 40), (17, 1), (0, 1), (48, 33)]
    check_attention(paged_case([0, 15, 16, 300, 130], chunks, dtype=dtype), device, split=SPLIT)


@pytest.mark.parametrize("dtype", [torch.float16, slow(torch.float32)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_size_matches_the_reference(device: str, head_dim: int, dtype: torch.dtype) -> None:
    case = paged_case([5, 130], [(0, 9), (33, 2)], head_dim=head_dim, kv_heads=1, dtype=dtype)
    check_attention(case, device, split=SPLIT)


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 1), (1, 3), (3, 1), (4, 3), (7, 1), (20, 1)])
def test_every_gqa_ratio_matches_the_reference(device: str, group: int, kv_heads: int) -> None:
    """Groups that do not divide a tile of queries, and one that is larger than the smallest tile."""
    check_attention(paged_case([5, BLOCK], [(0, 9), (33, 23)], group=group, kv_heads=kv_heads), device)


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("window", [None, 70])
def test_every_block_size_matches_the_reference(device: str, block_size: int, window: int | None) -> None:
    """Among them chunks of several splits, and those that begin and end within a block."""
    case = paged_case([0, 140], [(5, 11), (300, 2), (60, 70)], block_size=block_size)
    check_attention(case, device, window=window, split=SPLIT)


@pytest.mark.parametrize("window", [1, BLOCK, 100, 1000, *map(slow, (BLOCK - 1, BLOCK + 1))])
def test_a_sliding_window_matches_the_reference(device: str, window: int) -> None:
    """A long decode row's first splits are outside its window; in a chunk, each token has a window of its own."""
    case = paged_case([0, 15, 16, 300], [(0, 20), (50, 20), (33, 1)], kv_heads=1)
    check_attention(case, device, window=window, split=SPLIT)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize("window", [None, BLOCK, 100])
def test_all_combinations_match_the_reference(
    device: str, window: int | None, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    lengths, chunks = [1, BLOCK, 129, 600], [(0, 70), (17, 1), (48, 33), (300, 17)]
    case = paged_case(lengths, chunks, head_dim=head_dim, group=group, dtype=dtype)
    check_attention(case, device, window=window, split=SPLIT)


@pytest.mark.parametrize("split", [24, slow(128)])
def test_a_context_of_many_splits_matches_the_reference(device: str, split: int) -> None:
    """There are more splits than `combine` reads at a time, splits that no key tile divides, and rows that would exceed
    MOST_SPLITS, whose splits are longer."""
    lengths = [31 * split + 5, 16 * split, 3, MOST_SPLITS * split - 1, MOST_SPLITS * split, 50 * split]
    check_attention(paged_case(lengths, [], kv_heads=1), device, split=split)


def test_a_row_has_its_splits_by_its_own_length(device: str) -> None:
    """The result is the same to the last bit beside a row whose splits are longer than the minimum."""
    case = paged_case([4 * 24, MOST_SPLITS * 24, 100 * 24], [], kv_heads=1)
    together = attend(case, device, split=24)
    for row in range(3):
        rows = PagedRows(1, case.rows.contexts[row : row + 1], (1,), case.rows.block_tables[row : row + 1], BLOCK)
        assert torch.equal(
            attend(replace(case, q=case.q[row : row + 1], rows=rows), device, split=24)[0], together[row]
        )


def test_neighbours_do_not_change_a_row(device: str) -> None:
    """The result is the same to the last bit: splits end at fixed positions, and rows share no tiles."""
    case = paged_case([30, 300], [(20, 9), (500, 9), (0, 30), (290, 30)])
    together = attend(case, device, split=SPLIT)
    rows = case.rows
    ends = torch.tensor(rows.counts).cumsum(0).tolist()
    for row, (end, tokens_of_row) in enumerate(zip(ends, rows.counts, strict=True)):
        tokens = slice(end - tokens_of_row, end)
        count = rows.counts[row : row + 1]
        alone = PagedRows(
            int(row < 2), rows.contexts[row : row + 1], count, rows.block_tables[row : row + 1], rows.block_size
        )
        single = attend(replace(case, q=case.q[tokens], rows=alone), device, split=SPLIT)
        assert torch.equal(together[tokens], single)


def captured(case: Case, device: str, *, rows: int) -> AttentionPlan:
    """Return the plan of a captured step with room for more rows than the case has. Padding rows have other rows'
    blocks, so that reading them would not give NaN."""
    plan = captured_plan(rows, 40 * SPLIT // BLOCK, device, block_size=BLOCK, split=SPLIT)
    place(case, plan)
    return plan


@pytest.mark.parametrize(("decodes", "chunks"), [([0, 300], [(17, 30), (3, 2)]), ([], [(7, 5)]), ([9], [(40, 1)])])
def test_padding_cannot_leak(device: str, decodes: list[int], chunks: list[tuple[int, int]]) -> None:
    """A captured step has room for more rows than this one: these change no row, and nothing is written for them."""
    case = paged_case(decodes, chunks)
    alone = attend(case, device, split=SPLIT)
    behind = torch.full((5, *case.q.shape[1:]), torch.nan)
    got = attend(replace(case, q=torch.cat((case.q, behind))), device, plan=captured(case, device, rows=7))
    assert torch.equal(got[:-5], alone)
    assert (got[-5:] == POISON).all()


def test_decode_rows_of_a_captured_mixed_step_have_their_keys_split(device: str) -> None:
    """Regression guard: beside a chunk, a decode row was treated as one, and one program read all of its keys."""
    case = paged_case([2 * SPLIT, 5], [(40, 9)])
    plan = captured(case, device, rows=5)
    sums = plan.work(len(case.q), 3, UNLIMITED).sums
    assert sums[DECODE_ITEMS.value].diff().tolist() == [3, 1, 0, 0, 0]
    assert sums[CHUNK_ITEMS.value].diff().tolist() == [0, 0, 1, 0, 0]
    close(attend(case, device, plan=plan), attend(case, device, split=SPLIT))


@pytest.mark.slow
def test_a_captured_step_reads_the_rows_that_each_replay_finds(device: str) -> None:
    """Tensors, grid and room for partial results are those of the capture, and only the numbers within change: how many
    rows are decodes, and how long they are. Each row is the same to the last bit as in a step of its own."""
    buffers = captured_plan(12, 40, device, block_size=BLOCK, split=SPLIT)
    sizes = set()
    steps = (
        *(([30, 5, 290], [(300, 9), (0, 50)]), ([260] * 11, [(0, 2)])),
        *(([], [(500, 16), (3, 50)]), ([7], [])),
    )
    for case in (paged_case(*step, block_size=BLOCK) for step in steps):
        place(case, buffers)
        plan = replace(buffers)  # whose sums are made anew, as by a replay
        padding = torch.full((70 - len(case.q), *case.q.shape[1:]), torch.nan)
        got = attend(replace(case, q=torch.cat((case.q, padding))), device, plan=plan)
        assert torch.equal(got[: len(case.q)], attend(case, device, split=SPLIT))
        assert (got[len(case.q) :] == POISON).all()
        work = plan.work(70, 3, UNLIMITED)
        sizes.add((work.decode_items, work.partials, work.merged, *work.chunk_items.values()))
    assert len(sizes) == 1


def test_a_step_of_padding_alone_writes_nothing(device: str) -> None:
    case = paged_case([4], [(0, 3)])
    plan = replace(plan_of(case, device), rows=None)
    plan.lengths.zero_()
    plan.begins[2:] = plan.begins[1]
    assert (attend(case, device, plan=plan) == POISON).all()


def test_rows_that_are_on_the_device_are_taken_as_they_are(device: str) -> None:
    """The plan has the same tensors, so that a captured step reads what later steps put there."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Rows(PagedRows):
        num_chunks: int
        decodes: torch.Tensor
        first_tokens: torch.Tensor
        lengths: torch.Tensor
        tables: torch.Tensor
        max_length: int

    case = paged_case([40, 7], [(0, 5)])
    made = plan_of(case, device)
    rows = Rows(
        num_decode=2,
        contexts=(),
        counts=(),
        block_tables=made.block_tables,
        block_size=BLOCK,
        num_chunks=1,
        decodes=made.decodes,
        first_tokens=made.begins,
        lengths=made.lengths,
        tables=made.block_tables,
        max_length=4096,
    )
    plan = prepare_attention(rows, 2, case.q.dtype)
    for name in ("begins", "lengths", "block_tables", "decodes"):
        assert getattr(plan, name) is getattr(made, name)
    assert (plan.num_chunks, plan.max_length, plan.rows) == (1, 4096, None)
    close(attend(case, device, plan=plan), attend(case, device))


def test_queries_may_be_a_view_of_what_the_projection_gave(device: str) -> None:
    case = paged_case([4, 20], [(0, 3)])
    stacked = torch.full((5, 10, 16), torch.nan)
    stacked[:, :6] = case.q
    close(attend(replace(case, q=stacked[:, :6]), device), attend(case, device))


def test_a_call_that_would_read_wrong_memory_is_refused(device: str) -> None:
    case = paged_case([4], [])
    plan = plan_of(case, device)
    q, k, v = (x.to(device) for x in (case.q, case.k_cache, case.v_cache))
    with pytest.raises(ValueError, match=r"v_cache .* expected a contiguous tensor"):
        attention(q, k, v.transpose(1, 2), plan, 1.0)
    with pytest.raises(ValueError, match=r"q \[1, 6, 16\] has strides"):
        attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, plan, 1.0)
    with pytest.raises(ValueError, match="window is 0: expected at least 1"):
        attention(q, k, v, plan, 1.0, window=0)
