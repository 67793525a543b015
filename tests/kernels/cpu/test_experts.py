"""Owns the tests of mixtures of experts: the reference against the formula over all experts, torch against that.
Never compares with stored numbers: every input is random."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels import reference
from kernels.eager.ops import TORCH_CPU
from kernels.forward import Routing
from tests.kernels.experts_case import experts_case

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
ROUTINGS = [Routing(1, renormalize=True), Routing(2, renormalize=False), Routing(3, renormalize=True)]


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_the_reference_equals_the_sum_over_all_experts_with_shares_of_nothing_for_the_others(routing: Routing) -> None:
    x, router, gate_up, down = (tensor.double() for tensor in experts_case(9, 5))
    logits = x @ router.T
    shares = logits.softmax(-1)
    least = logits.topk(routing.per_token).values[:, -1:]
    shares = shares.masked_fill(logits < least, 0.0)
    if routing.renormalize:
        shares = shares / shares.sum(-1, keepdim=True)
    gate, up = torch.einsum("th,eoh->eto", x, gate_up).chunk(2, dim=-1)
    want = torch.einsum("te,eth->th", shares, torch.einsum("eti,ehi->eth", F.silu(gate) * up, down))
    got = reference.experts(x.float(), router.float(), gate_up.float(), down.float(), routing)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 3), (2, 16), (40, 3), (17, 64)])
def test_tokens_sorted_by_expert_match_the_reference(
    num_tokens: int, num_experts: int, routing: Routing, dtype: torch.dtype
) -> None:
    given = experts_case(num_tokens, num_experts, dtype=dtype)
    got, want = TORCH_CPU.experts(*given, routing), reference.experts(*given, routing)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_token_that_is_not_finite_spoils_no_other() -> None:
    x, *weights = experts_case(12, 4)
    want = TORCH_CPU.experts(x, *weights, ROUTINGS[1])  # type: ignore[call-arg]
    x = x.clone()
    x[5] = torch.nan
    got = TORCH_CPU.experts(x, *weights, ROUTINGS[1])  # type: ignore[call-arg]
    others = [token for token in range(12) if token != 5]
    torch.testing.assert_close(got[others], want[others], atol=1e-6, rtol=1e-6)
    assert got[5].isnan().all()
