"""The contract of exchanged rows, on each kind of group: whole, in order, also of ranks without any, and never half.
Never depends on time: a limit is far longer than what it limits."""

from __future__ import annotations

import signal

import pytest
import torch
from torch import Tensor

from tests.kernels.collectives import jobs
from tests.kernels.collectives.conftest import Make
from tests.support.ranks import LostResult, ranks, run_ranks
from tests.support.seeds import next_seed

WIDE = jobs.SLOT_BYTES // 4 + 3


def uneven(size: int) -> list[tuple[list[list[int]], int]]:
    """Counts of rows from each rank to each, and widths: none, one's alone, more than slots have, own ones too."""
    nothing = [[0] * size for _ in range(size)]
    one = [[0] * size for _ in range(size)]
    one[size - 1][0] = 1
    any_ = [[(3 * source + 5 * to) % 4 for to in range(size)] for source in range(size)]
    large = [[7 * (source + 1) * (to != source) for to in range(size)] for source in range(size)]
    own = [[9 * (source == to) for to in range(size)] for source in range(size)]
    return [(nothing, 3), (one, 1), (any_, 17), (large, 5), (any_, WIDE), (own, WIDE), (any_, 1)]


def wanted(rank: int, counts: list[list[int]], width: int, dtype: torch.dtype, seed: int) -> Tensor:
    parts = [jobs.rows_for(source, counts, width, dtype, seed).split(own) for source, own in enumerate(counts)]
    return torch.cat([part[rank] for part in parts])


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_gets_the_rows_that_all_have_for_it_in_the_order_of_ranks(
    group: Make, size: int, dtype: torch.dtype
) -> None:
    seed, cases = next_seed() % 1000, uneven(size)
    found = run_ranks(group(), size, jobs.exchanges, cases, dtype, seed)
    for number, (counts, width) in enumerate(cases):
        for rank in range(size):
            rows, received = found[rank][number]
            assert received == [source[rank] for source in counts]
            assert torch.equal(rows, wanted(rank, counts, width, dtype, seed)), f"rank {rank}, case {number}"


def test_a_rank_without_rows_takes_part_and_none_is_ahead_in_the_next_call(group: Make) -> None:
    found = run_ranks(group(), 3, jobs.exchange_and_sum)
    assert found == [([1.0] * 2 + [2.0] * 4, [3.0, 3.0]), ([], [3.0, 3.0]), ([], [3.0, 3.0])]


def test_ranks_that_exchange_rows_of_different_widths_are_stopped(group: Make) -> None:
    found = run_ranks(group(), 3, jobs.exchange_different_rows)
    assert all(isinstance(message, LostResult) for message in found)
    assert len(set(found)) == 1
    assert "rows of 20 bytes" in found[0]
    assert "rows of 16 bytes" in found[0]


@pytest.mark.parametrize("lost", [0, 2])
def test_ranks_that_are_left_name_the_rank_that_was_killed_in_an_exchange(group: Make, lost: int) -> None:
    with ranks(group(), 3, jobs.exchange_until_lost) as started:
        for rank in range(3):
            started.told(rank)
        started.signal(lost, signal.SIGKILL)
        assert started.results(lost) == [LostResult(f"Rank {lost} has died.")] * 2


def test_a_rank_without_memory_for_its_rows_ends_all_because_others_may_have_theirs(group: Make) -> None:
    """If it only failed, it could come to the exchange again, and meet others in their next one."""
    found = run_ranks(group(), 3, jobs.exchange_without_memory)
    reason = "Rank 2 gave up: it could not take the rows that others have for it: MemoryError: injected."
    assert found == [LostResult(reason)] * 3


def test_a_rank_that_leaves_after_an_exchange_has_made_it_whole_for_all(group: Make) -> None:
    """Otherwise a step that some ranks have made would fail on others."""
    for _ in range(3):
        assert run_ranks(group(), 3, jobs.exchange_and_leave) == [[2.0], [0.0], [1.0]]
