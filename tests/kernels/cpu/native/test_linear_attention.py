"""Owns the comparison of native linear attention with the reference in edge cases, and of cuts of a text.
Never compares with stored numbers: every input is random, and outputs and unused states are poisoned first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cpu.native.linear_attention import LinearAttentionProgram, Rewind
from kernels.cpu.native.program import Buffer, StepRows, Team
from kernels.eager.ops import REFERENCE
from kernels.forward import LinearHeads
from kernels.rows.step import StateRows
from tests.kernels.rows import seeded_generator
from tests.kernels.states import HEADS, STEPS, Inputs, inputs
from tests.support.compiler import needs_compiler

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
WHOLE_BLOCKS = LinearHeads(num_key_heads=1, num_value_heads=2, key_dim=24, value_dim=128)
"""Values of as many columns as one or more blocks have."""
ODD = LinearHeads(num_key_heads=1, num_value_heads=3, key_dim=17, value_dim=75)
"""Values of a whole block and a part of one, for queries that fill no vector."""
ALL_HEADS = {"less than a vector": HEADS, "whole blocks": WHOLE_BLOCKS, "odd": ODD}
MOST_EDGES = ("edges of tiles", "ragged")
"""Steps with the rows of all others."""
CAPACITY = 300

pytestmark = needs_compiler


def program_of(team: Team, dtype: torch.dtype, capacity: int = CAPACITY) -> LinearAttentionProgram:
    return LinearAttentionProgram(team, block_size=16, capacity=capacity, dtype=dtype)


def step_of(rows: StateRows, tokens: Sequence[int] | None = None, drafted: tuple[int, int] = (0, 0)) -> StepRows:
    """Pack rows whose tokens are numbered through, or `tokens`. KV blocks are of no account."""
    ends = list(accumulate(rows.counts, initial=0))
    numbers = range(ends[-1]) if tokens is None else tokens
    blocks = [[0] * (context + count) for context, count in zip(rows.contexts, rows.counts, strict=True)]
    each = [list(numbers[begin:end]) for begin, end in pairwise(ends)]
    return StepRows(each, rows.contexts, rows.counts, blocks, state_slots=rows.slots, drafted=drafted)


@dataclass
class Native:
    """Both operations with states of an Inputs, on a program that reads parts of one projection."""

    given: Inputs
    conv_state: Tensor
    state: Tensor
    program: LinearAttentionProgram
    convolved: Buffer
    read: Buffer
    rewind: Rewind | None

    @classmethod
    def record(cls, team: Team, given: Inputs, *, rewinds: bool = False) -> Native:
        """rewinds: rows may have drafts."""
        dtype, heads = given.qkv.dtype, given.heads
        conv_state, state = given.conv_state.clone(), given.state.clone()
        program = program_of(team, dtype)
        rewind = program.rewind = Rewind(program_of(team, dtype, 40), 40, dtype) if rewinds else None
        sizes = (heads.channels, heads.num_value_heads, heads.num_value_heads)
        parts = program.split(program.embed(torch.cat((given.qkv, given.strength, given.step), dim=1)), sizes)
        convolved = program.causal_conv(parts[0], given.conv, conv_state)
        read = program.delta_rule(parts[0], parts[1], parts[2], given.rates, heads, state)
        return cls(given, conv_state, state, program, convolved, read, rewind)

    def run(self, step: StepRows) -> tuple[Tensor, Tensor]:
        """Return what the convolution and the delta rule give for the step's tokens."""
        outputs = []
        for out in (self.convolved, self.read):
            out.tensor.fill_(torch.nan)
        self.program.run(step)
        for out in (self.convolved, self.read):
            assert out.tensor[step.num_tokens :].isnan().all(), "a row that the step does not have was written"
            outputs.append(out.tensor[: step.num_tokens].clone())
        return outputs[0], outputs[1]

    def states_at(self, slot: int) -> tuple[Tensor, Tensor]:
        return self.conv_state[slot].clone(), self.state[slot].clone()


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True)


# --- against the reference --------------------------------------------------------------------------------------------


RAGGED = [(name, heads) for heads in ALL_HEADS for name in STEPS if ALL_HEADS[heads] is HEADS or name in MOST_EDGES]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("name", "size"), RAGGED)
def test_ragged_rows_match_the_reference_and_leave_other_slots_alone(
    team: Team, name: str, size: str, dtype: torch.dtype
) -> None:
    given = inputs(name, dtype, heads=ALL_HEADS[size])
    native = Native.record(team, given)
    convolved, read = native.run(step_of(given.rows))
    for got, after, (want, wanted) in (
        (convolved, native.conv_state, given.causal_conv(REFERENCE)),
        (read, native.state, given.delta_rule(REFERENCE)),
    ):
        assert not want.isnan().any()
        close(got, want, dtype)
        close(after, wanted, torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kernel", [1, 4, 7])
@pytest.mark.parametrize("name", ["chunks of one token", "mixed", "a whole prompt"])
def test_a_convolution_of_any_width_matches_the_reference(
    team: Team, name: str, kernel: int, dtype: torch.dtype
) -> None:
    """Also of fewer tokens than it is wide."""
    given = inputs(name, dtype, kernel=kernel)
    native = Native.record(team, given)
    want, wanted = given.causal_conv(REFERENCE)
    close(native.run(step_of(given.rows))[0], want, dtype)
    torch.testing.assert_close(native.conv_state, wanted, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("decay", [1e-6, 0.1, 800.0])
def test_the_delta_rule_of_130_tokens_is_as_close_to_float64_as_float32_allows(team: Team, decay: float) -> None:
    """Also of states that never fade, and of those that fade at once."""
    given = inputs("ragged", torch.float32, heads=WHOLE_BLOCKS)
    given = replace(given, rates=(torch.full((2,), -decay), given.rates[1]))
    q, k, v = (part.double() for part in reference.delta_inputs(given.qkv, WHOLE_BLOCKS))
    log_decay = reference.log_decay(given.step, given.rates).double()
    row, first = 4, 9  # the whole prompt of 130 tokens, and where its tokens begin
    part = slice(first, first + 130)
    assert given.rows.counts[row] == 130
    zeros = torch.zeros(2, 24, 128, dtype=torch.float64)
    strength = given.strength.double().sigmoid()
    want, after = reference.recur(q[part], k[part], v[part], log_decay[part], strength[part], zeros)
    native = Native.record(team, given)
    _, read = native.run(step_of(given.rows))
    torch.testing.assert_close(read[part].double(), want.flatten(1), atol=3e-6, rtol=3e-6)
    torch.testing.assert_close(native.state[given.rows.slots[row]].double(), after, atol=3e-6, rtol=3e-6)


# --- gates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "size"), [(1, 1), (3, 12), (2, 128), (2, 75)])
def test_a_gated_norm_matches_the_reference(team_of_three: Team, heads: int, size: int, dtype: torch.dtype) -> None:
    generator = seeded_generator()
    width = heads * size
    table = torch.randn(9, 2 * width, generator=generator).to(dtype)
    weight = torch.rand(size, generator=generator).to(dtype)
    program = program_of(team_of_three, dtype)
    x = program.embed(table[:, :width].contiguous())
    gate = program.split(program.embed(table), (width, width))[1]
    out = program.gated_rms_norm(x, gate, weight, 1e-6)
    out.tensor.fill_(torch.nan)
    program.run(tokens_only(9))
    want = reference.gated_rms_norm(table[:, :width], table[:, width:], weight, 1e-6)
    close(out.tensor[:9], want, dtype)
    assert out.tensor[9:].isnan().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("size", [2, 16, 50])
def test_a_sigmoid_gate_matches_the_reference(
    team_of_three: Team, size: int, added: bool, by_token: bool, dtype: torch.dtype
) -> None:
    generator = seeded_generator()
    x, gates, other = (torch.randn(9, width, generator=generator).to(dtype) for width in (size, 2 * size, size))
    program = program_of(team_of_three, dtype)
    gate = program.split(program.embed(gates), (size, 1 if by_token else size))[1]
    out = program.sigmoid_gate(program.embed(x), gate, program.embed(other) if added else None)
    out.tensor.fill_(torch.nan)
    program.run(tokens_only(9))
    found = gates[:, size : size + (1 if by_token else size)]
    close(out.tensor[:9], reference.sigmoid_gate(x, found, other if added else None), dtype)
    assert out.tensor[9:].isnan().all()


def test_a_gate_that_is_extreme_has_its_limit_and_one_that_is_no_number_is_not_hidden(team: Team) -> None:
    x, gate = torch.ones(4, 1), torch.tensor([[-1e4], [1e4], [-100.0], [torch.nan]])
    program = program_of(team, torch.float32)
    out = program.sigmoid_gate(program.embed(x), program.embed(gate))
    normed = program.gated_rms_norm(program.embed(x), program.embed(gate), torch.ones(1), 0.0)
    program.run(tokens_only(4))
    assert out.tensor[:3].flatten().tolist() == pytest.approx([0.0, 1.0, 0.0], abs=1e-30)
    assert normed.tensor[:3].flatten().tolist() == pytest.approx([0.0, 1e4, 0.0], abs=1e-30)
    assert out.tensor[3].isnan()
    assert normed.tensor[3].isnan()


def tokens_only(count: int) -> StepRows:
    return StepRows([list(range(count))], [0], [count], [[0] * count])


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", ALL_HEADS.values(), ids=ALL_HEADS)
@pytest.mark.parametrize("sizes", [[1] * 70, [2, 1, 1, 31, 35], [64, 6], [69, 1]], ids=lambda sizes: str(sizes[:5]))
def test_a_text_that_is_cut_has_the_bits_of_the_whole(
    team: Team, sizes: list[int], heads: LinearHeads, dtype: torch.dtype
) -> None:
    """In chunks shorter than the convolution too, and token by token as decode rows are."""
    given = inputs("a whole prompt", dtype, heads=heads)
    whole = Native.record(team, given)
    want = whole.run(step_of(given.rows))
    cut, slot = Native.record(team, given), given.rows.slots[0]
    found: list[tuple[Tensor, Tensor]] = []
    for begin, end in pairwise(accumulate(sizes, initial=0)):
        rows = replace(given.rows, contexts=(begin,), counts=(end - begin,))
        found.append(cut.run(step_of(rows, range(begin, end))))
    for parts, together in zip(zip(*found, strict=True), want, strict=True):
        assert torch.equal(torch.cat(parts), together)
    for got, wanted in zip(cut.states_at(slot), whole.states_at(slot), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", ALL_HEADS.values(), ids=ALL_HEADS)
@pytest.mark.parametrize("name", MOST_EDGES)
def test_a_row_has_the_same_bits_alone_and_beside_others(
    team: Team, name: str, heads: LinearHeads, dtype: torch.dtype
) -> None:
    given = inputs(name, dtype, heads=heads)
    together = Native.record(team, given)
    want = together.run(step_of(given.rows))
    alone = Native.record(team, given)
    for row, (begin, end) in enumerate(pairwise(accumulate(given.rows.counts, initial=0))):
        slot = given.rows.slots[row]
        rows = StateRows(0, (given.rows.contexts[row],), (end - begin,), (slot,), given.rows.index[row : row + 1])
        for got, wanted in zip(alone.run(step_of(rows, range(begin, end))), want, strict=True):
            assert torch.equal(got, wanted[begin:end])
        for got, wanted in zip(alone.states_at(slot), together.states_at(slot), strict=True):
            assert torch.equal(got, wanted)


# --- drafts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", ALL_HEADS.values(), ids=ALL_HEADS)
def test_states_of_rows_with_drafts_advance_past_the_accepted_tokens_alone_to_the_same_bits(
    team: Team, heads: LinearHeads, dtype: torch.dtype
) -> None:
    """Rows have the states of "edges of tiles", and fewer tokens."""
    given = inputs("edges of tiles", dtype, heads=heads)
    slots, contexts = given.rows.slots, given.rows.contexts
    rows = replace(
        given.rows, contexts=(*contexts[:1], *contexts[2:]), counts=(1, 5, 3, 9, 2), slots=(slots[0], *slots[2:])
    )
    step, expected = Native.record(team, given, rewinds=True), Native.record(team, given)
    before = [step.states_at(slot) for slot in rows.slots]
    want = expected.run(step_of(rows))
    for got, wanted in zip(step.run(step_of(rows, drafted=(1, 3))), want, strict=True):
        assert torch.equal(got, wanted), "drafts are computed as a chunk is"
    for row in (1, 2, 3):
        for got, kept in zip(step.states_at(rows.slots[row]), before[row], strict=True):
            assert torch.equal(got, kept), "what was rejected must not be in the state"
    for row in (0, 4):
        for got, wanted in zip(step.states_at(rows.slots[row]), expected.states_at(rows.slots[row]), strict=True):
            assert torch.equal(got, wanted)
    # Of row 1 two tokens are accepted, of row 2 none, of row 3 all.
    accepted = replace(
        rows, contexts=(rows.contexts[1], rows.contexts[3]), counts=(2, 9), slots=(rows.slots[1], rows.slots[3])
    )
    assert step.rewind is not None
    step.rewind.program.run(
        StepRows(
            [[0] * 2, [0] * 9],
            accepted.contexts,
            accepted.counts,
            [[0] * 99] * 2,
            [0, 1, *range(8, 17)],
            accepted.slots,
        )
    )
    alone = Native.record(team, given)
    alone.run(step_of(accepted, [1, 2, *range(9, 18)]))
    for slot in accepted.slots:
        for got, wanted in zip(step.states_at(slot), alone.states_at(slot), strict=True):
            assert torch.equal(got, wanted)
    for got, kept in zip(step.states_at(rows.slots[2]), before[2], strict=True):
        assert torch.equal(got, kept)


def test_drafts_are_shared_out_only_in_steps_that_have_any(team: Team) -> None:
    """The second operation's three parts are copied together."""
    given = inputs("edges of tiles", torch.float32)
    plain, ready = (Native.record(team, given, rewinds=rewinds) for rewinds in (False, True))

    def shares(native: Native, drafted: tuple[int, int] = (0, 0)) -> int:
        rows = replace(given.rows, counts=(1, 1, 5, 3, 9, 1))
        before = team.num_shares
        native.program.run(step_of(rows, drafted=drafted))
        return team.num_shares - before

    assert shares(ready) == shares(plain) > 3
    assert shares(ready, (2, 3)) == shares(plain) + 2


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [(7,), (-1,), ()])
def test_a_slot_that_is_not_there_is_refused_before_anything_is_read(team: Team, slots: tuple[int, ...]) -> None:
    given = inputs("one decode row", torch.float32)
    assert len(given.state) == 4
    native = Native.record(team, given)
    with pytest.raises(IndexError, match="not there"):
        native.program.run(StepRows([[0]], [3], [1], [[0] * 4], state_slots=slots))
    assert native.read.tensor.abs().sum() == 0.0


@pytest.mark.parametrize("sizes", [(4, 3, 4), (3, 4, 4), (4, 4, 3)], ids=str)
def test_a_slot_that_one_layer_lacks_is_refused_wherever_that_layer_is(team: Team, sizes: tuple[int, ...]) -> None:
    program = program_of(team, torch.float32)
    x = program.embed(torch.randn(9, 8, generator=seeded_generator()))
    for size in sizes:
        x = program.causal_conv(x, torch.ones(8, 4), torch.zeros(size, 3, 8))
    program.run(StepRows([[0]], [3], [1], [[0] * 4], state_slots=(2,)))
    with pytest.raises(IndexError, match="not there"):
        program.run(StepRows([[0]], [3], [1], [[0] * 4], state_slots=(3,)))


@pytest.mark.parametrize("drafted", [(-1, 1), (0, 7), (6, 1), (7, 0), (1, -1), (2, 2**63 - 1)], ids=str)
def test_rows_with_drafts_that_the_step_does_not_have_are_refused(team: Team, drafted: tuple[int, int]) -> None:
    given = inputs("edges of tiles", torch.float32)
    native = Native.record(team, given, rewinds=True)
    rows = replace(given.rows, counts=(1, 1, 5, 3, 9, 1))
    with pytest.raises(IndexError, match="not there"):
        native.program.run(step_of(rows, drafted=drafted))
    assert native.read.tensor.abs().sum() == 0.0
    native.run(step_of(rows, drafted=(0, 6)))
    native.run(step_of(rows, drafted=(6, 0)))


def test_more_drafted_tokens_than_memory_was_reserved_for_are_an_error_of_ours(team: Team) -> None:
    given = inputs("edges of tiles", torch.float32)
    for rewinds, counts in ((True, (1, 1, 5, 3, 32, 1)), (False, (1, 1, 1, 1, 2, 1))):
        native = Native.record(team, given, rewinds=rewinds)
        rows = replace(given.rows, counts=counts)
        with pytest.raises(AssertionError):
            native.program.run(step_of(rows, drafted=(1, 4)))
        assert native.read.tensor.abs().sum() == 0.0
