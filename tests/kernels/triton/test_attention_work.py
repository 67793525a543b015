"""Owns the comparison of attention's work items with a plain enumeration of them, and of launched programs with items.
Never trusts one side's rule: splits are found here by search, and items are listed one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.kernels.rows import paged_case
from tests.kernels.triton.cases import POISON, attend, plan_of
from tests.support.seeds import next_seed

from kernels.rows.device import on_device  # isort: skip
from kernels.triton.attention import attention as launches  # isort: skip
from kernels.triton.attention.combine import HEADS  # isort: skip
from kernels.triton.attention.kernel import CHUNK_CONFIGS, DECODE_CONFIGS  # isort: skip
from kernels.triton.attention.plan import AttentionPlan, prepare_attention  # isort: skip
from kernels.triton.attention.splits import FEW_SPLITS, SPLIT, SPLITS, STEP, least_split, num_splits, split_size  # isort: skip
from kernels.triton.attention.work import CHUNK_TILES, UNLIMITED, Work, most_work  # isort: skip
from kernels.triton.shared.launch import WITHOUT_GPU  # isort: skip

DECODE, PARTIALS, MERGED, CHUNKS = range(4)
EDGES = sorted({max(1, split * SPLIT + more) for split in (0, 1, 2, 5, 15, 16, 31, 32, 33, 128) for more in (-1, 0, 1)})


def searched_size(length: int, count: int, split: int) -> int:
    """Return a split's keys by search for the smallest that is allowed."""
    if count == 1 and length <= 16 * split:
        return split
    most = 32 if count == 1 else min(max(256 // count, 1), 16)
    least = 2 * split if count == 1 else 2 * min(split, 256)
    sizes = (max(least, size) for size in range(128, length + 128, 128))
    return next(size for size in sizes if size * most >= length)


def listed_items(length: int, count: int, pairs: int, tile: int, window: int, split: int) -> list[tuple[int, int]]:
    """Return the (tile, split) items of a row of so many queries, but those of splits that no token of it sees."""
    size, oldest = searched_size(length, count, split), max(0, length - count - window + 1)
    parts = [begin // size for begin in range(0, length, size) if begin + size > oldest]
    return [(first // tile, part) for first in range(0, pairs, tile) for part in parts]


def plan_for(rows: list[tuple[int, int]], num_decode: int, split: int, *, captured: bool = False) -> AttentionPlan:
    """rows: (length, count) of each."""
    counts = torch.tensor([0, *(count for _, count in rows)])
    lengths = torch.tensor([length for length, _ in rows], dtype=torch.int32)
    return AttentionPlan(
        counts.cumsum(0).to(torch.int32),
        lengths,
        torch.zeros(len(rows), 1, dtype=torch.int32),
        decodes=torch.tensor([num_decode], dtype=torch.int32),
        num_decode=len(rows) if captured else num_decode,
        num_chunks=len(rows) if captured else len(rows) - num_decode,
        max_length=max(length for length, _ in rows),
        rows=None if captured else tuple(rows),
        split=split,
    )


def random_rows(draw: random.Random) -> tuple[list[tuple[int, int]], int]:
    """Return (rows, how many are decodes). Chunks are of any length, and some rows are padding."""
    longest = draw.choice([300, 5000, 140_000])
    decodes = [(draw.randint(1, longest), 1) for _ in range(draw.randrange(70))]
    chunks = [(0, 0)]
    for _ in range(draw.randrange(300)):
        count = draw.choice([1, 2, 9, 16, 17, 50, 128, 129, draw.randint(1, 2000)])
        chunks += [(draw.randrange(longest) + count, count), *[(0, 0)] * draw.randrange(2)]
    return decodes + chunks, len(decodes)


@pytest.mark.parametrize("split", [SPLIT, 24, FEW_SPLITS])
@pytest.mark.parametrize("count", [1, 2, 9, 16, 17, 50, 128, 129, 5000])
def test_a_row_is_split_by_its_length_and_count_as_on_the_device(count: int, split: int) -> None:
    draw = random.Random(next_seed())
    lengths = [length for length in (*EDGES, *(draw.randint(1, 300_000) for _ in range(50))) if length >= count]
    lengths.append(count)
    sums = plan_for([(length, count) for length in lengths], 0, split).work(1, 1, UNLIMITED).sums
    for length, partials in zip(lengths, sums[PARTIALS].diff().tolist(), strict=True):
        size = searched_size(length, count, split)
        assert split_size(length, count, split) == size
        splits = num_splits(length, count, split)
        assert splits == len(range(0, length, size))
        assert partials == (count * splits if splits > 1 else 0)


def test_longer_splits_hold_whole_key_tiles() -> None:
    assert {STEP % config.kwargs["BLOCK_N"] for config in DECODE_CONFIGS + CHUNK_CONFIGS} == {0}
    assert {split % STEP for split in (SPLIT, FEW_SPLITS, *(split for _, split in SPLITS))} == {0}
    assert {config.kwargs["TILE"] for config in CHUNK_CONFIGS} <= set(CHUNK_TILES)


@pytest.mark.parametrize(
    ("length", "count", "splits"), [(1024, 1, 4), (8192, 1, 16), (32_768, 1, 32), (32_818, 50, 5), (32_777, 9, 16)]
)
def test_a_row_alone_has_splits_enough_for_a_gpu(length: int, count: int, splits: int) -> None:
    """With 8 KV heads and 4 queries for each, a suffix of 50 tokens on a long prefix has 4 tiles: 160 programs."""
    assert num_splits(length, count) == splits


def test_rows_that_fill_a_gpu_have_fewer_splits() -> None:
    """On an H200, splits of 256 keys took a quarter longer than whole rows of 1,024 where 64 rows of 8 KV heads
    decode."""
    sizes = [least_split(rows, 8, chunks=False) for rows in range(300)]
    assert sizes == sorted(sizes)
    assert [num_splits(1024, 1, sizes[rows]) for rows in (1, 2, 3, 8, 9, 64, 256)] == [8, 8, 4, 4, 1, 1, 1]
    assert least_split(64, 1, chunks=False) == sizes[8], "programs count, and each KV head has its own"
    assert [least_split(rows, 8, chunks=True) for rows in (0, 1, 8, 9)] == [SPLIT, SPLIT, SPLIT, FEW_SPLITS]


@pytest.mark.parametrize(
    ("decodes", "chunks", "split"), [(1, 0, 128), (3, 0, SPLIT), (1, 1, SPLIT), (9, 0, FEW_SPLITS)]
)
def test_a_plan_has_the_splits_of_its_decodes_and_kv_heads(decodes: int, chunks: int, split: int) -> None:
    """They follow from the rows themselves, and in a captured step from the most decodes that it may have."""
    case = paged_case([5] * decodes, [(3, 4)] * chunks, kv_heads=8, group=2, block_size=4)
    assert prepare_attention(case.rows, 8, case.q.dtype).split == split
    captured = replace(on_device(case.rows, torch.device("cpu")), contexts=(), counts=())
    assert prepare_attention(captured, 8, case.q.dtype).split == split


@pytest.mark.parametrize("decodes", [0, 1, 2, 3, 64])
def test_a_chunk_has_the_same_splits_beside_any_number_of_decodes(decodes: int) -> None:
    split = least_split(decodes, 8, chunks=True)
    assert [num_splits(length, 50, split) for length in (500, 5_000, 100_000)] == [1, 5, 5]


@pytest.mark.parametrize("count", [129, 2048])
def test_a_chunk_of_many_tiles_is_never_split(count: int) -> None:
    assert num_splits(131_072, count) == 1


@pytest.mark.parametrize("split", [SPLIT, 24, FEW_SPLITS])
@pytest.mark.parametrize("window", [UNLIMITED, 1, 100, 3000])
def test_items_are_those_of_a_plain_enumeration(window: int, split: int) -> None:
    draw = random.Random(next_seed())
    for group in (1, 3, 4, 20):
        rows, num_decode = random_rows(draw)
        tokens = sum(count for _, count in rows)
        exact = plan_for(rows, num_decode, split).work(tokens, group, window)
        bound = plan_for(rows, num_decode, split, captured=True).work(tokens, group, window)
        of_decodes, tiles = [listed_items(*row, 1, 1, window, split) for row in rows[:num_decode]], {}
        for tile in CHUNK_TILES:
            tiles[tile] = [
                listed_items(n, c, c * group, tile, window, split) if n else [] for n, c in rows[num_decode:]
            ]
        splits = [len(listed_items(*row, 1, 1, UNLIMITED, split)) if row[0] else 0 for row in rows]
        several = [(count, parts) for (_, count), parts in zip(rows, splits, strict=True) if parts > 1]
        want = [
            [len(items) for items in of_decodes] + [0] * (len(rows) - num_decode),
            [count * parts if parts > 1 else 0 for (_, count), parts in zip(rows, splits, strict=True)],
            [count if parts > 1 else 0 for (_, count), parts in zip(rows, splits, strict=True)],
            *([0] * num_decode + [len(items) for items in tiles[tile]] for tile in CHUNK_TILES),
        ]
        for sums, column in zip(exact.sums, want, strict=True):
            assert sums[0] == 0
            assert sums.diff().tolist() == column
        assert torch.equal(exact.sums, bound.sums)
        assert (exact.decode_items, exact.partials, exact.merged) == tuple(map(sum, want[:CHUNKS]))
        assert exact.partials == sum(count * parts for count, parts in several)
        assert list(exact.chunk_items.values()) == [sum(column) for column in want[CHUNKS:]]
        assert exceeded(exact, bound) == []


def exceeded(exact: Work, bound: Work) -> list[str]:
    """Return which bounds are less than what there is."""
    assert exact.exact
    assert not bound.exact
    names = ("decode_items", "partials", "merged")
    found = [name for name in names if getattr(exact, name) > getattr(bound, name)]
    return found + [f"chunks of {tile}" for tile in CHUNK_TILES if exact.chunk_items[tile] > bound.chunk_items[tile]]


def test_partial_results_of_a_captured_step_are_bounded() -> None:
    """The figures of Work's docstring: with 32 heads of 128, 537 MB, and 67 MB for decodes alone."""
    sums = torch.zeros(5, 258, dtype=torch.int32)
    mixed = most_work(sums, 2048, 256, 257, 32_768, 4, least_split(256, 8, chunks=True))
    assert mixed.partials == 32_768
    assert most_work(sums, 2048, 256, 257, 32_768, 4, SPLIT).partials == 36_880
    decodes = most_work(sums[:, :257], 256, 256, 0, 32_768, 4, least_split(256, 8, chunks=False))
    assert decodes.partials == 4096
    assert set(decodes.chunk_items.values()) == {0}, "no launch for chunks in a step that has none"
    assert min(mixed.chunk_items.values()) > 0
    assert most_work(sums, 2048, 256, 257, SPLIT, 4, SPLIT).partials == 0
    assert most_work(sums[:, :257], 256, 256, 0, FEW_SPLITS, 4, FEW_SPLITS).partials == 0
    assert most_work(sums, 2048, 256, 257, FEW_SPLITS, 4, FEW_SPLITS).partials > 0, "chunks have splits of 512 keys"


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note how many programs each launch has."""
    from triton.runtime.interpreter import interpreter_builder as builder

    found: list[int] = []
    begin = builder.set_grid_dim

    def noted(*sizes: int) -> None:
        begin(*sizes)
        found.append(sizes[0] * sizes[1] * sizes[2])

    monkeypatch.setattr(builder, "set_grid_dim", noted)
    return found


def test_an_eager_step_launches_a_program_for_each_item(device: str, grids: list[int]) -> None:
    """Sums, decodes, chunks, and the merge of the tokens that have several splits, so many heads at a time."""
    case = paged_case([300, 5, 1000], [(700, 30), (3, 40)])
    plan = plan_of(case, device)
    group, kv_heads, heads = 3, 2, 6
    attend(case, device, plan=plan)
    decodes = sum(num_splits(length, 1) for length in (301, 6, 1001))
    chunks = -(-30 * group // 64) * num_splits(730, 30) + -(-40 * group // 64)
    assert num_splits(730, 30) == 2
    assert grids == [5, decodes * kv_heads, chunks * kv_heads, (2 + 30) * -(-heads // HEADS)]


def test_an_eager_step_launches_no_more_programs_than_a_grid_holds(
    device: str, grids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = paged_case([300, 5, 1000], [(700, 30), (3, 40)])
    want = attend(case, device)
    monkeypatch.setattr(launches, "MOST_PROGRAMS", 2)
    grids.clear()
    assert torch.equal(attend(case, device), want)
    assert grids == [5, 2 * 2, 2 * 2, 2]


def test_a_split_that_begins_within_a_tile_of_one_entry_is_refused(device: str) -> None:
    """Its keys would be taken from the block after, or from whatever block comes next in memory."""
    case = paged_case([100], [], block_size=64)
    with pytest.raises(ValueError, match=r"split is 24: expected a multiple of 128 with blocks of 64 slots\."):
        attend(case, device, split=24)


def test_rows_of_one_split_have_no_partial_results(device: str, grids: list[int]) -> None:
    """Nothing is merged, in whatever company the plan of an eager step is made."""
    case = paged_case([SPLIT - 1, 3], [(0, 200), (300, 30)])
    plan = plan_of(case, device)
    attend(case, device, plan=plan)
    work = plan.work(len(case.q), 3, UNLIMITED)
    assert (work.partials, work.merged) == (0, 0)
    assert len(grids) == 3


def test_a_captured_step_launches_no_more_programs_than_a_gpu_runs_in_a_few_turns(
    device: str, grids: list[int]
) -> None:
    """Regression guard: it launched programs for the longest row that there may be on every row, for every head: here
    2 x 48 x 32, of which 96 found something to do."""
    case = paged_case([30] * 48, [])
    plan = replace(plan_of(case, device), rows=None, max_length=32_768)
    got = attend(case, device, plan=plan)
    assert torch.equal(got, attend(case, device))
    assert grids[1] == launches.PROGRAMS_PER_MULTIPROCESSOR * WITHOUT_GPU
    assert max(grids[:3]) <= 2 * launches.PROGRAMS_PER_MULTIPROCESSOR * WITHOUT_GPU + 6  # rounded up for each head


@pytest.mark.slow
def test_a_captured_mixed_step_launches_no_more_programs_than_tokens_fill_or_a_gpu_runs(
    device: str, grids: list[int]
) -> None:
    """Whichever of the two is more: surplus rows and splits that there may be have none."""
    case = paged_case([40], [(0, 400), (500, 20)])
    wide = replace(plan_of(case, device), rows=None, num_decode=40, num_chunks=41, max_length=32_768)
    got = attend(case, device, plan=wide)
    assert torch.equal(got, attend(case, device))
    few = launches.PROGRAMS_PER_MULTIPROCESSOR * WITHOUT_GPU
    assert grids[1] == few
    assert grids[2] == max(few, len(case.q) * 3 // 64 * 2)


def test_the_heaviest_tiles_of_a_chunk_come_first(device: str) -> None:
    """The last tokens see the most keys: begun last, they were waited for. Only the first item is computed here."""
    case = paged_case([], [(0, 100)], kv_heads=1, group=1)
    plan = plan_of(case, device)
    want = attend(case, device, plan=plan)
    plan.work(100, 1, UNLIMITED).sums[CHUNKS:, -1] = 1
    got = attend(case, device, plan=plan)
    assert torch.equal(got[64:], want[64:])
    assert (got[:64] == POISON).all()


def test_items_are_summed_up_once_a_step_for_each_kind_of_layer(device: str, grids: list[int]) -> None:
    case = paged_case([4], [(0, 3)])
    plan = plan_of(case, device)
    for _ in range(3):
        for window in (None, 2):
            attend(case, device, plan=plan, window=window)
    assert grids.count(5) == 2
