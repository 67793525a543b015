"""The experts of a recorded pass that ranks have between them: to the bit those of a rank that has all of them.
Never depends on the order of processes: ranks meet in each exchange."""

from __future__ import annotations

import signal

import pytest
import torch

from kernels.cpu.native.program import Program, StepRows, Team
from tests.kernels.collectives import jobs
from tests.kernels.collectives.conftest import Make
from tests.support.compiler import needs_compiler
from tests.support.ranks import LostResult, ranks, run_ranks

pytestmark = needs_compiler

STEPS = [[5, 9, 1], [0, 40, 3], [0, 0, 0], [64, 64, 64], [1, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("foreign", "threads"), [(False, 1), (False, 3), (True, 2)])
def test_a_token_gets_the_bits_that_a_rank_with_all_experts_gives_it(
    memory: Make, foreign: bool, threads: int, dtype: torch.dtype
) -> None:
    """Whatever others have: in some steps a rank has no tokens, in one nobody has any, and rows take several slots."""
    found = run_ranks(memory(), 3, jobs.divided_experts, foreign, threads, STEPS, dtype)
    program = Program(Team(1), block_size=16, capacity=64, dtype=dtype)
    out = jobs.record_mixture(program, dtype, range(7))
    program.run(StepRows([list(range(64))], [0], [64], [list(range(5))]))
    for rank in range(3):
        for counts, got in zip(STEPS, found[rank], strict=True):
            assert torch.equal(got, out.tensor[: counts[rank]]), f"rank {rank}, {counts}"


@pytest.mark.parametrize("how", ["grouped", pytest.param("rounded", marks=pytest.mark.slow)])
def test_experts_in_groups_give_a_token_the_same_bits_on_whatever_rank_they_are(memory: Make, how: str) -> None:
    found = run_ranks(memory(), 3, jobs.divided_experts, False, 2, STEPS, torch.float32, how)
    program = Program(Team(1), block_size=16, capacity=64, dtype=torch.float32)
    out = jobs.record_mixture(program, torch.float32, range(7), how)
    program.run(StepRows([list(range(64))], [0], [64], [list(range(5))]))
    assert out.tensor[:64].isfinite().all()
    for rank in range(3):
        for counts, got in zip(STEPS, found[rank], strict=True):
            assert torch.equal(got, out.tensor[: counts[rank]]), f"rank {rank}, {counts}"


@pytest.mark.parametrize("foreign", [False, True])
def test_a_rank_without_room_for_what_comes_ends_all_and_writes_none_of_it(memory: Make, foreign: bool) -> None:
    first, second = run_ranks(memory(), 2, jobs.more_rows_than_there_is_room, foreign)
    assert "room for 6 rows" in second
    assert first != "computed"


def test_a_pass_ends_when_a_rank_is_killed_whose_experts_it_needs(memory: Make) -> None:
    with ranks(memory(), 2, jobs.experts_until_lost) as started:
        started.told(0)
        started.told(1)
        started.signal(1, signal.SIGKILL)
        assert started.told(0) == LostResult("Rank 1 has died.")
