"""Owns the tests of linear attention: the reference against its formula, torch against the reference in edge cases.
Never compares with stored numbers: every input is random."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.cpu.linear_attention import PIECE, by_pieces, one_step
from kernels.eager.ops import REFERENCE, TORCH_CPU
from kernels.rows.step import StateRows
from tests.kernels.rows import seeded_generator
from tests.kernels.states import HEADS, STEPS, inputs

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def tokens_of_one(count: int, *, decay: float = 0.1) -> list[Tensor]:
    """Draw q, k, v, log_decay, strength and a state in float64, as `recur` takes them."""
    generator = seeded_generator()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (reference.l2_norm(normal(count, 3, 8)) for _ in "qk")
    log_decay = -normal(count, 3).abs() * decay
    return [q, k, normal(count, 3, 12), log_decay, normal(count, 3).sigmoid(), normal(3, 8, 12)]


# --- the reference ----------------------------------------------------------------------------------------------------


def test_the_recurrence_is_that_of_the_paper() -> None:
    """arXiv 2412.06464: S_t = S_(t-1) (a_t (I - b_t k_t k_t^T)) + b_t v_t k_t^T; their state is transposed."""
    q, k, v, log_decay, strength, state = tokens_of_one(9)
    read, after = reference.recur(q, k, v, log_decay, strength, state)
    for head in range(3):
        paper = state[head].T
        for t in range(9):
            forgets = torch.eye(8, dtype=torch.float64) - strength[t, head] * torch.outer(k[t, head], k[t, head])
            paper = paper @ (log_decay[t, head].exp() * forgets)
            paper = paper + strength[t, head] * torch.outer(v[t, head], k[t, head])
            torch.testing.assert_close(read[t, head], paper @ q[t, head], atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(after[head], paper.T, atol=1e-12, rtol=1e-12)


def test_the_convolution_is_that_of_torch_over_the_whole_text() -> None:
    given = inputs("a whole prompt", torch.float32)
    got, state = given.causal_conv(REFERENCE)
    want = F.conv1d(given.qkv.T, given.conv.unsqueeze(1), padding=3, groups=HEADS.channels)[:, : len(given.qkv)]
    torch.testing.assert_close(got, F.silu(want.T), atol=1e-5, rtol=1e-5)
    assert torch.equal(state[given.rows.slots[0]], given.qkv[-3:])


def test_queries_and_keys_have_length_one_and_a_key_head_serves_neighbouring_value_heads() -> None:
    qkv = torch.randn(4, HEADS.channels, generator=seeded_generator())
    q, k, v = reference.delta_inputs(qkv, HEADS)
    torch.testing.assert_close(k.norm(dim=-1), torch.ones(4, 6), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(q.norm(dim=-1), torch.full((4, 6), 8**-0.5), atol=1e-5, rtol=1e-5)
    assert torch.equal(k[:, 0], k[:, 2])
    assert not torch.equal(k[:, 2], k[:, 3])
    torch.testing.assert_close(k[:, 3], F.normalize(qkv[:, 24:32]), atol=1e-5, rtol=1e-5)
    assert torch.equal(v.flatten(1), qkv[:, 32:])


def test_the_gated_norm_is_over_each_head_and_the_gate_comes_after_it() -> None:
    generator = seeded_generator()
    x, gate, weight = (torch.randn(*shape, generator=generator) for shape in ((3, 24), (3, 24), (12,)))
    want = F.rms_norm(x.view(3, 2, 12), (12,), weight, 1e-6).flatten(1) * F.silu(gate)
    for ops in (REFERENCE, TORCH_CPU):
        torch.testing.assert_close(ops.gated_rms_norm(x, gate, weight, 1e-6), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 24])
def test_a_sigmoid_gate_is_of_each_number_or_of_the_token_and_adds_what_it_is_given(width: int) -> None:
    generator = seeded_generator()
    x, gate, other = (torch.randn(3, size, generator=generator) for size in (24, width, 24))
    for ops in (REFERENCE, TORCH_CPU):
        torch.testing.assert_close(ops.sigmoid_gate(x, gate, None), x * gate.sigmoid(), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(ops.sigmoid_gate(x, gate, other), other + x * gate.sigmoid(), atol=1e-6, rtol=1e-6)


# --- by pieces --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 2])
@pytest.mark.parametrize("piece", [1, 5, PIECE])
def test_pieces_give_what_the_recurrence_gives_token_by_token(count: int, piece: int) -> None:
    given = tokens_of_one(count)
    for got, want in zip(by_pieces(*given, piece=piece), reference.recur(*given), strict=True):
        torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("decay", [0.0, 1e-6, 800.0])
def test_states_that_never_fade_and_those_that_fade_at_once_stay_finite(decay: float) -> None:
    """exp(800) overflows: a token's future must be masked before the exponential."""
    given = tokens_of_one(PIECE + 3, decay=decay)
    for got, want in zip(by_pieces(*given), reference.recur(*given), strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("cuts", [[1], [3, 16, 17], [PIECE, PIECE + 1], list(range(1, 90, 4))])
def test_a_state_that_is_carried_from_chunk_to_chunk_is_that_of_the_whole(cuts: list[int]) -> None:
    q, k, v, log_decay, strength, state = tokens_of_one(90)
    whole, last = by_pieces(q, k, v, log_decay, strength, state)
    read = []
    for begin, end in zip([0, *cuts], [*cuts, 90], strict=True):
        part = slice(begin, end)
        found, state = by_pieces(q[part], k[part], v[part], log_decay[part], strength[part], state)
        read.append(found)
    torch.testing.assert_close(torch.cat(read), whole, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(state, last, atol=1e-10, rtol=1e-10)


def test_one_step_of_several_requests_is_the_recurrence_of_each() -> None:
    each = [tokens_of_one(1) for _ in range(4)]
    given = [torch.cat([one[i] for one in each]) for i in range(5)]
    read, after = one_step(*given, torch.stack([one[5] for one in each]))
    for number, one in enumerate(each):
        want, state = reference.recur(*one)
        torch.testing.assert_close(read[number], want[0], atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(after[number], state, atol=1e-12, rtol=1e-12)


# --- rows of a step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_the_delta_rule_of_ragged_rows_matches_the_reference_and_leaves_other_slots_alone(
    name: str, side_by_side: bool, dtype: torch.dtype
) -> None:
    given = inputs(name, dtype, side_by_side=side_by_side)
    (got, after), (want, wanted) = given.delta_rule(TORCH_CPU), given.delta_rule(REFERENCE)
    assert got.dtype == dtype
    assert not want.isnan().any()
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(after, wanted, atol=2e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_the_convolution_of_ragged_rows_matches_the_reference_and_leaves_other_slots_alone(
    name: str, side_by_side: bool, kernel: int, dtype: torch.dtype
) -> None:
    given = inputs(name, dtype, side_by_side=side_by_side, kernel=kernel)
    (got, after), (want, wanted) = given.causal_conv(TORCH_CPU), given.causal_conv(REFERENCE)
    assert not want.isnan().any()
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(after, wanted, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("ops", [REFERENCE, TORCH_CPU], ids=lambda ops: str(ops.name))
@pytest.mark.parametrize("cut", [1, 2, 3, 64, 69])
def test_a_text_that_is_cut_is_convolved_as_the_whole_is(ops: object, cut: int) -> None:
    """Also if a chunk is shorter than the convolution's kernel, and if the rest comes as decode rows."""
    given = inputs("a whole prompt", torch.float32)
    whole, wanted = given.causal_conv(ops)
    slots, index = given.rows.slots, given.rows.index
    ends = [cut, *range(cut + 1, len(given.qkv) + 1)]
    found, begin = [], 0
    for end in ends:
        decodes = int(begin > 0)
        part = replace(given, qkv=given.qkv[begin:end], rows=StateRows(decodes, (begin,), (end - begin,), slots, index))
        out, state = part.causal_conv(ops)
        given = replace(given, conv_state=state)
        found.append(out)
        begin = end
    torch.testing.assert_close(torch.cat(found), whole, atol=1e-6, rtol=1e-6)
    assert torch.equal(given.conv_state[slots[0]], wanted[slots[0]])
