"""Contracts of experts that are spread over ranks: each token gets what the reference computes, whatever others have.
Never starts a process: the ranks here are threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.collectives.experts import NUM_EXCHANGES, exchange_experts
from kernels.collectives.group import RankLostError
from kernels.forward import Routing, held_experts
from tests.kernels.experts_case import exact_case, experts_case
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
        return exchange_experts(ranks, parts[ranks.rank], router, *held, routing)

    with ThreadPoolExecutor(size) as pool:
        ends = make_thread_groups(size)
        results = list(pool.map(exchange, ends))
    assert [end.num_calls for end in ends] == [NUM_EXCHANGES] * size
    for part, got in zip(parts, results, strict=True):
        want = reference.experts(part, router, gate_up, down, routing)
        torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_token_s_sum_is_the_same_to_the_bit_whatever_other_ranks_have() -> None:
    """All products and sums of this case are exact: only what leaks into them could change them."""
    x, router, gate_up, down = exact_case(12, 6)
    routing, own = Routing(2, renormalize=False), x[:5]

    def exchange(ranks: ThreadGroup, tokens: Tensor) -> Tensor:
        held = held_experts(6, ranks.rank, ranks.size)
        return exchange_experts(
            ranks, tokens, router, gate_up[held.start : held.stop], down[held.start : held.stop], routing
        )

    with ThreadPoolExecutor(2) as pool:
        beside = [next(pool.map(exchange, make_thread_groups(2), (own, other))) for other in (x[:0], x[5:], x)]
    assert torch.equal(beside[0], beside[1])
    assert torch.equal(beside[0], beside[2])


def test_a_rank_that_cannot_compute_rows_of_others_ends_all_and_nobody_sums_without_them() -> None:
    x, router, gate_up, down = experts_case(4, 4)
    broken = down[2:, :-1]  # of the second rank

    def exchange(ranks: ThreadGroup) -> str:
        held = (gate_up[:2], down[:2]) if ranks.rank == 0 else (gate_up[2:], broken)
        with pytest.raises(RankLostError) as lost:
            exchange_experts(ranks, x, router, *held, Routing(3, renormalize=True))
        return str(lost.value)

    with ThreadPoolExecutor(2) as pool:
        _, second = pool.map(exchange, make_thread_groups(2))
    assert "could not compute rows of others" in second
