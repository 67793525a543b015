"""Sums over ranks in a forward pass: recorded, with a group that the library knows or through Python, and eager.
Never depends on which thread meets the others."""

from __future__ import annotations

import signal

import pytest
import torch

from kernels.eager.forward import EagerPass
from kernels.eager.ops import REFERENCE
from kernels.forward import Linear
from tests.kernels.collectives import jobs
from tests.kernels.collectives.conftest import Make
from tests.support.compiler import needs_compiler
from tests.support.ranks import ranks, run_ranks

pytestmark = needs_compiler

SHAPE = (300, 144)
SLOT_BYTES = 32_832
"""The largest steps take several pieces, of which each thread sums several parts, the last one smaller."""
COUNTS = [1, 7, 300, 0, 200]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("foreign", "threads"), [(False, 1), (False, 3), (True, 3)])
def test_a_recorded_sum_is_the_group_s_to_the_bit(
    memory: Make, foreign: bool, threads: int, dtype: torch.dtype
) -> None:
    found = run_ranks(memory(slot_bytes=SLOT_BYTES), 2, jobs.native_sums, foreign, threads, COUNTS, SHAPE, dtype)
    parts = [jobs.numbers_of(rank, SHAPE, dtype, 0) for rank in range(2)]
    once = (parts[0].float() + parts[1].float()).to(dtype)
    twice = (once.float() + once.float()).to(dtype)
    for rank in range(2):
        for count, (got_once, got_twice) in zip(COUNTS, found[rank], strict=True):
            assert torch.equal(got_once, once[:count])
            assert torch.equal(got_twice, twice[:count])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_a_layer_in_shards_is_the_layer(memory: Make, dtype: torch.dtype, tolerance: float) -> None:
    count = 20
    found = run_ranks(memory(), 2, jobs.shards_of_a_layer, dtype, count)
    table, up, down = jobs.layer_weights(dtype)
    ids = torch.arange(count)
    whole = EagerPass(REFERENCE, token_ids=ids, positions=ids, slots=ids, plan=None)
    want = jobs.layer(whole, table, Linear(up), Linear(down), ranks=False)
    for native, eager in found:
        torch.testing.assert_close(native, want, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(eager, want, atol=tolerance, rtol=tolerance)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(("foreign", "threads", "count"), [(False, 1, 4), (False, 3, 100), (True, 3, 4)])
def test_a_run_ends_when_a_rank_is_lost_and_nothing_is_computed_after_it(
    memory: Make, foreign: bool, threads: int, count: int
) -> None:
    """100 tokens are summed by all threads, four by one."""
    with ranks(memory(slot_bytes=SLOT_BYTES), 2, jobs.run_until_lost, foreign, threads, count) as started:
        started.told(0)
        started.told(1)
        started.signal(1, signal.SIGKILL)
        said, went_on, again = started.told(0)
        assert said == again == "Rank 1 has died."
        assert not went_on


def test_a_pass_without_ranks_sums_over_none() -> None:
    ids = torch.arange(4)
    alone = EagerPass(REFERENCE, token_ids=ids, positions=ids, slots=ids, plan=None)
    with pytest.raises(AssertionError, match="no ranks"):
        alone.all_reduce(torch.ones(4))
