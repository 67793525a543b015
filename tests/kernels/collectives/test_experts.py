"""Contracts of experts that are spread over ranks: each token gets what the reference computes, whatever others have.
Never starts a process: the ranks here are threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.collectives.experts import NUM_SUMS, exchange_experts, held_experts
from kernels.forward import Routing
from tests.kernels.experts_case import experts_case
from tests.support.rank_threads import ThreadGroup, make_thread_groups

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize(("count", "size"), [(8, 2), (8, 3), (5, 4), (2, 4)])
def test_every_expert_is_held_by_one_rank_and_none_holds_two_more_than_another(count: int, size: int) -> None:
    held = [held_experts(count, rank, size) for rank in range(size)]
    assert [number for own in held for number in own] == list(range(count))
    assert max(map(len, held)) - min(map(len, held)) <= 1


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("counts", [(4, 4), (9, 1), (0, 3), (5, 0, 2), (1, 2, 3, 4), (0, 0)], ids=str)
def test_ranks_with_different_numbers_of_tokens_get_what_one_with_all_experts_computes(
    counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    routing, size, num_experts = Routing(2, renormalize=True), len(counts), 5
    x, router, gate_up, down = experts_case(sum(counts) + 1, num_experts, dtype=dtype)
    parts = torch.split(x[: sum(counts)], counts)

    def exchange(ranks: ThreadGroup) -> Tensor:
        own = held_experts(num_experts, ranks.rank, size)
        held = gate_up[own.start : own.stop], down[own.start : own.stop]
        return exchange_experts(ranks, parts[ranks.rank], max(counts) + 1, router, *held, routing)

    with ThreadPoolExecutor(size) as pool:
        ends = make_thread_groups(size)
        results = list(pool.map(exchange, ends))
    assert [end.num_calls for end in ends] == [NUM_SUMS] * size
    for part, got in zip(parts, results, strict=True):
        want = reference.experts(part, router, gate_up, down, routing)
        torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
