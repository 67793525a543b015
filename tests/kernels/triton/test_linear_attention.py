"""Owns the comparison of Triton's linear attention and its gates with the reference, in the interpreter.
Never compares with stored numbers: every input is random, and every output is poisoned first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import reference
from kernels.eager.ops import REFERENCE
from kernels.forward import LinearHeads
from kernels.rows.device import DeviceStateRows, states_on_device
from kernels.rows.step import StateRows
from tests.kernels.rows import seeded_generator
from tests.kernels.states import HEADS, STEPS, inputs
from tests.kernels.triton.cases import EPS, POISON, TOLERANCE, close, poisoned, slow

from triton.runtime.interpreter import interpreter_builder  # isort: skip

from kernels.triton.linear_attention import causal_conv as convolution  # isort: skip
from kernels.triton.linear_attention import delta_rule as delta  # isort: skip
from kernels.triton.linear_attention.causal_conv import causal_conv  # isort: skip
from kernels.triton.linear_attention.delta_rule import PIECE, VALUES_AT_A_TIME, delta_rule  # isort: skip
from kernels.triton.elementwise.gates import BLOCK, gated_rms_norm, sigmoid_gate  # isort: skip

CASES = [
    *((name, torch.float32) for name in STEPS if name not in ("edges of tiles", "ragged")),
    ("mixed", torch.float16),
    ("decode rows", torch.bfloat16),
    slow("ragged", torch.float32),
]
OF_STATES = 1e-4
"""Nearly parallel keys make a piece's system ill-conditioned: one draw in thousands was off by 6e-5."""
WIDE = LinearHeads(num_key_heads=1, num_value_heads=2, key_dim=20, value_dim=VALUES_AT_A_TIME + 6)


def on(device: str, rows: StateRows) -> DeviceStateRows:
    """Return rows as a captured step has them: only what is on the device."""
    there = states_on_device(replace(rows, index=rows.index.to(device)))
    return replace(there, contexts=(), counts=(), slots=())


def check_delta_rule(device: str, name: str, dtype: torch.dtype, heads: LinearHeads = HEADS) -> None:
    given = inputs(name, dtype, heads=heads)
    want, wanted = given.delta_rule(REFERENCE)
    state = given.state.clone().to(device)
    out = poisoned(want.shape, dtype, device)
    tensors = (x.to(device) for x in (given.qkv, given.strength, given.step))
    rates = (given.rates[0].to(device), given.rates[1].to(device))
    assert delta_rule(*tensors, rates, heads, state, on(device, given.rows), out=out) is out  # type: ignore[call-arg]
    close(out, want)
    torch.testing.assert_close(state.cpu(), wanted, atol=OF_STATES, rtol=OF_STATES, equal_nan=True)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_delta_rule_matches_the_reference_and_leaves_other_slots_alone(
    device: str, name: str, dtype: torch.dtype
) -> None:
    check_delta_rule(device, name, dtype)


@pytest.mark.parametrize("name", ["decode rows", slow("mixed")])
def test_the_delta_rule_takes_heads_that_fill_no_tile(device: str, name: str) -> None:
    check_delta_rule(device, name, torch.float32, WIDE)


@pytest.mark.parametrize("count", [2, PIECE - 1, PIECE, PIECE + 1])
def test_chunks_at_the_edges_of_a_piece_match_the_reference(device: str, count: int) -> None:
    given = inputs("a whole prompt", torch.float32)
    rows = replace(given.rows, counts=(count,))
    given = replace(given, rows=rows, **{name: getattr(given, name)[:count] for name in ("qkv", "strength", "step")})
    want, wanted = given.delta_rule(REFERENCE)
    state = given.state.clone().to(device)
    tensors = (x.to(device) for x in (given.qkv, given.strength, given.step))
    rates = (given.rates[0].to(device), given.rates[1].to(device))
    close(delta_rule(*tensors, rates, HEADS, state, on(device, rows)), want)  # type: ignore[call-arg]
    torch.testing.assert_close(state.cpu(), wanted, atol=OF_STATES, rtol=OF_STATES, equal_nan=True)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_convolution_matches_the_reference_and_leaves_other_slots_alone(
    device: str, name: str, dtype: torch.dtype
) -> None:
    given = inputs(name, dtype)
    want, wanted = given.causal_conv(REFERENCE)
    state = given.conv_state.clone().to(device)
    out = poisoned(want.shape, dtype, device)
    got = causal_conv(given.qkv.to(device), given.conv.to(device), state, on(device, given.rows), out=out)
    assert got is out
    close(out, want)
    torch.testing.assert_close(state.cpu(), wanted, atol=0, rtol=0, equal_nan=True)


def test_the_convolution_takes_a_slice_of_a_wider_matrix_and_more_channels_than_a_program(device: str) -> None:
    generator = seeded_generator()
    channels = convolution.CHANNELS_AT_A_TIME + 5
    wide, weight = torch.randn(6, channels + 9, generator=generator), torch.randn(channels, 4, generator=generator)
    rows = StateRows(0, (0,), (6,), (1,), torch.tensor([1]))
    state, got_state = (torch.full((2, 3, channels), torch.nan) for _ in "ab")
    want = reference.causal_conv(wide[:, 4 : channels + 4], weight, state, rows)
    got_state = got_state.to(device)
    close(causal_conv(wide.to(device)[:, 4 : channels + 4], weight.to(device), got_state, on(device, rows)), want)
    torch.testing.assert_close(got_state.cpu(), state, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("kernel", [2, 4, convolution.TOKENS_AT_A_TIME + 3])
def test_tiles_of_a_row_are_convolved_in_any_order(
    device: str, kernel: int, backwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU tiles run concurrently: none may write the state before the others have read it."""
    given = inputs("edges of tiles", torch.float32, kernel=kernel)
    want, wanted = given.causal_conv(REFERENCE)
    place = interpreter_builder.set_grid_idx
    if backwards:
        monkeypatch.setattr(
            interpreter_builder, "set_grid_idx", lambda x, y, z: place(interpreter_builder.grid_dim[0] - 1 - x, y, z)
        )
    state = given.conv_state.clone().to(device)
    out = poisoned(want.shape, torch.float32, device)
    causal_conv(given.qkv.to(device), given.conv.to(device), state, on(device, given.rows), out=out)
    close(out, want)
    torch.testing.assert_close(state.cpu(), wanted, atol=0, rtol=0, equal_nan=True)


def test_a_captured_step_launches_tiles_for_its_tokens_and_not_for_as_many_in_each_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression guard: each layer launched 65 rows times the pieces of 2,048 tokens; all but 128 had nothing to do."""
    grids: dict[str, tuple[int, ...]] = {}

    class Noted:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids[self._name] = grid
            return lambda *args, **options: None

    for module, name in ((convolution, "_convolve"), (delta, "_one_step"), (delta, "_invert"), (delta, "_scan")):
        monkeypatch.setattr(module, name, Noted(name))
    tokens, counts = 2048, (*[1] * 64, 2048 - 64)
    rows = StateRows(0, (3,) * 65, counts, tuple(range(65)), torch.arange(65))
    captured = replace(on("cpu", rows), max_count=tokens)
    qkv, of_heads = torch.zeros(tokens, HEADS.channels), torch.zeros(tokens, HEADS.num_value_heads)
    state, rates = torch.zeros(65, HEADS.num_value_heads, HEADS.key_dim, HEADS.value_dim), (of_heads[0], of_heads[0])
    delta_rule(qkv, of_heads, of_heads, rates, HEADS, state, captured)
    weight = torch.zeros(HEADS.channels, 4)
    causal_conv(qkv, weight, torch.zeros(65, 3, HEADS.channels), captured)
    assert grids == {
        "_one_step": (65, HEADS.num_value_heads, 1),
        "_scan": (65, HEADS.num_value_heads, 1),
        "_invert": (tokens // PIECE + 65, HEADS.num_value_heads),
        "_convolve": (tokens // convolution.TOKENS_AT_A_TIME + 65, 1),
    }
    causal_conv(qkv[:65], weight, torch.zeros(65, 3, HEADS.channels), replace(captured, max_count=1))
    assert grids["_convolve"] == (65, 1)


PADDING = {
    "decode rows": [(3, 1), (3, 1)],
    "mixed": [(3, 0), (3, 5)],
    "edges of tiles": [(1, 0), (3, 0), (6, 0), (6, 150)],
}
"""(row that it precedes, tokens) of each padding row: one token each, or rows of none before one of many."""


@pytest.mark.parametrize("name", PADDING)
def test_rows_of_padding_are_neither_read_nor_written(device: str, name: str) -> None:
    """The step is like a captured one, which does not know how long any row is."""
    given = inputs(name, torch.float32)
    tokens, padding = len(given.qkv), [count for _, count in PADDING[name]]
    each = list(zip(given.rows.contexts, given.rows.counts, given.rows.slots, strict=True))
    for before, count in reversed(PADDING[name]):
        each.insert(before, (0, count, -1))
    contexts, counts, slots = zip(*each, strict=True)
    rows = replace(given.rows, contexts=contexts, counts=counts, slots=slots, index=torch.tensor(slots))
    padded = replace(on(device, rows), max_count=1 if name == "decode rows" else tokens + sum(padding))
    want, wanted = given.delta_rule(REFERENCE)
    conv_want, conv_wanted = given.causal_conv(REFERENCE)

    def more(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, torch.full((sum(padding), *x.shape[1:]), torch.nan))).to(device)

    state, conv_state = given.state.clone().to(device), given.conv_state.clone().to(device)
    rates = (given.rates[0].to(device), given.rates[1].to(device))
    out = poisoned((tokens + sum(padding), HEADS.value_size), torch.float32, device)
    tensors = (more(x) for x in (given.qkv, given.strength, given.step))
    delta_rule(*tensors, rates, HEADS, state, padded, out=out)  # type: ignore[call-arg]
    conv_out = poisoned((tokens + sum(padding), HEADS.channels), torch.float32, device)
    causal_conv(more(given.qkv), given.conv.to(device), conv_state, padded, out=conv_out)
    for found, expected in ((out, want), (conv_out, conv_want)):
        close(found[:tokens], expected)
        assert (found[tokens:] == POISON).all(), "padding was written"
    for after, expected in ((state, wanted), (conv_state, conv_wanted)):
        torch.testing.assert_close(after.cpu(), expected, atol=OF_STATES, rtol=OF_STATES, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 12, 64])
def test_the_gated_norm_matches_the_reference(device: str, size: int, dtype: torch.dtype) -> None:
    generator = seeded_generator()
    x = torch.randn(3, 5 * size, generator=generator).to(dtype)
    wide, weight = torch.randn(3, 7 * size, generator=generator).to(dtype), torch.rand(size, generator=generator)
    gate = wide[:, size : 6 * size]
    out = poisoned(x.shape, dtype, device)
    got = gated_rms_norm(x.to(device), wide.to(device)[:, size : 6 * size], weight.to(device), EPS, out=out)
    assert got is out
    close(out, reference.gated_rms_norm(x, gate, weight, EPS))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("size", [1, BLOCK, BLOCK + 1])
def test_the_sigmoid_gate_matches_the_reference(device: str, size: int, by_token: bool, dtype: torch.dtype) -> None:
    generator = seeded_generator()
    x, wide, other = (torch.randn(3, width, generator=generator).to(dtype) for width in (size, size + 2, size))
    gate = wide[:, 1 : 2 if by_token else size + 1]
    for added in (None, other):
        out = poisoned(x.shape, dtype, device)
        there = wide.to(device)[:, 1 : 2 if by_token else size + 1]
        assert sigmoid_gate(x.to(device), there, None if added is None else added.to(device), out=out) is out
        close(out, reference.sigmoid_gate(x, gate, added))
