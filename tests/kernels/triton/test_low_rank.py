"""Owns the comparison of Triton's low-rank products with the reference, in the interpreter.
Never compares with stored numbers: every input is random, and all that nobody may read is poisoned."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.forward import LowRankStack
from kernels.rows.adapter_tokens import NO_SLOT, TILE, AdapterTokens, count_tiles, most_tiles, pack_tokens
from tests.kernels.low_rank_case import low_rank_case, mixed
from tests.kernels.triton.cases import TOLERANCE, close, poisoned_buffers, slow

from kernels.triton.low_rank.expand import OUTPUTS_AT_A_TIME, add_low_rank  # isort: skip
from kernels.triton.low_rank.shrink import SPLIT, shrink  # isort: skip

QKV = (40, 16, 16)
"""Outputs of each part."""


@pytest.fixture(autouse=True)
def _poisoned_buffers() -> Iterator[None]:
    with poisoned_buffers():
        yield


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("parts", [(20,), (24, 24), QKV], ids=str)
def test_products_of_every_kind_of_stack_are_those_of_the_reference(
    device: str, parts: tuple[int, ...], dtype: torch.dtype
) -> None:
    case = low_rank_case(mixed(11), parts=parts, dtype=dtype)
    close(case.run(add_low_rank, device), case.want())


@pytest.mark.parametrize("count", [1, TILE - 1, TILE, TILE + 1, 2 * TILE])
def test_tokens_of_one_adapter_at_the_edges_of_a_tile_are_those_of_the_reference(device: str, count: int) -> None:
    case = low_rank_case([2] * count)
    close(case.run(add_low_rank, device), case.want())


@pytest.mark.parametrize("ranks", [16, 48, 64, 80, slow(256)])
@pytest.mark.parametrize("own_rank", [1, 8, None], ids=str)
def test_ranks_below_and_beyond_a_program_are_those_of_the_reference(
    device: str, ranks: int, own_rank: int | None
) -> None:
    case = low_rank_case(mixed(7), ranks=ranks, own_rank=own_rank, parts=QKV)
    close(case.run(add_low_rank, device), case.want())


@pytest.mark.parametrize("inputs", [1, 63, 65, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 100])
def test_inputs_at_the_edges_of_a_split_are_those_of_the_reference(device: str, inputs: int) -> None:
    case = low_rank_case(mixed(5), inputs=inputs)
    close(case.run(add_low_rank, device), case.want())


@pytest.mark.parametrize(
    "parts",
    [(1,), (OUTPUTS_AT_A_TIME - 1,), (OUTPUTS_AT_A_TIME, OUTPUTS_AT_A_TIME + 1), (130, 1, 257)],
    ids=str,
)
def test_outputs_at_the_edges_of_a_tile_are_those_of_the_reference(device: str, parts: tuple[int, ...]) -> None:
    case = low_rank_case(mixed(5), parts=parts)
    close(case.run(add_low_rank, device), case.want())


def test_every_slot_at_once_is_that_of_the_reference(device: str) -> None:
    case = low_rank_case([3, 0, 1, 2, 2, 0, 3, 1] * 20)
    close(case.run(add_low_rank, device), case.want())


def test_tokens_without_an_adapter_keep_every_bit(device: str) -> None:
    case = low_rank_case(mixed(40))
    got = case.run(add_low_rank, device)
    without = [token for token, slot in enumerate(case.slots) if slot == NO_SLOT]
    assert len(without) == 8
    assert torch.equal(got[without], case.y[without])


def test_a_step_in_which_no_token_has_an_adapter_changes_nothing(device: str) -> None:
    case = low_rank_case([NO_SLOT] * 5)
    assert torch.equal(case.run(add_low_rank, device, spare_tokens=3, spare_tiles=4), case.y)


def test_padding_and_neighbours_change_no_token(device: str) -> None:
    """Whole numbers, because the interpreter's BLAS may add up one row in another order than the next."""
    case = low_rank_case(mixed(70), parts=QKV, inputs=SPLIT + 30, whole=True)
    got = case.run(add_low_rank, device, spare_tokens=6, spare_tiles=3)
    assert torch.equal(got, case.want())
    for token in (1, 5, 69):
        alone = case._replace(x=case.x[token:][:1], y=case.y[token:][:1], slots=case.slots[token:][:1])
        assert torch.equal(alone.run(add_low_rank, device)[0], got[token])


def test_tokens_and_outputs_may_lie_in_wider_matrices(device: str) -> None:
    case = low_rank_case(mixed(6), parts=QKV)
    packed = pack_tokens(case.slots, [1] * 6, 6, count_tiles(case.slots, [1] * 6)).to(device)
    wide_x, wide_y = (torch.nn.functional.pad(z, (3, 2), value=7.0).to(device) for z in (case.x, case.y))
    stack = LowRankStack(case.stack.a.to(device), case.stack.b.to(device), case.stack.firsts)
    add_low_rank(wide_y[:, 3:-2], wide_x[:, 3:-2], stack, AdapterTokens.of(packed, 6))
    close(wide_y[:, 3:-2], case.want())
    assert (wide_y[:, :3] == 7).all()
    assert (wide_y[:, -2:] == 7).all()


def test_slots_that_lie_in_one_memory_beside_other_stacks_are_read_where_they_lie(device: str) -> None:
    case = low_rank_case(mixed(9), parts=QKV)
    a, b = case.stack.a.flatten(1), case.stack.b.flatten(1)
    memory = torch.cat((torch.full((4, 5), torch.nan), a, torch.full((4, 3), torch.nan), b), dim=1).to(device)
    views = memory[:, 5 : 5 + a.shape[1]].view(case.stack.a.shape), memory[:, -b.shape[1] :].view(case.stack.b.shape)
    close(case._replace(stack=LowRankStack(*views, case.stack.firsts)).run(add_low_rank, device), case.want())


def test_the_parts_of_a_sum_are_of_fixed_inputs(device: str) -> None:
    case = low_rank_case([1, 1], inputs=2 * SPLIT + 5, whole=True)
    tokens = AdapterTokens.of(pack_tokens([1, 1], [1, 1], 2, 1).to(device), 2)
    sums = shrink(case.x.to(device), case.stack.a.flatten(1, 2).to(device), tokens).cpu()
    want = [x @ a.T for x, a in zip(case.x.split(SPLIT, 1), case.stack.a[1, 0].split(SPLIT, 1), strict=True)]
    assert torch.equal(sums, torch.stack(want, dim=1))


def test_ranks_or_outputs_that_lie_otherwise_are_refused(device: str) -> None:
    case = low_rank_case([0])
    tokens = AdapterTokens.of(pack_tokens([0], [1], 1, 1), 1)
    eight = LowRankStack(case.stack.a[:, :, :8], case.stack.b[:, :, :8], (0,))
    with pytest.raises(ValueError, match=r"the stack 8 ranks: expected 1 last, and 16, 32"):
        add_low_rank(case.y, case.x, eight, tokens)
    with pytest.raises(ValueError, match=r"y has strides \(40, 2\)"):
        add_low_rank(torch.zeros(1, 40)[:, ::2], case.x, case.stack, tokens)


# --- the order of tokens ---------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 150)), max_size=12), st.integers(0, 5), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_the_order_has_each_token_with_an_adapter_once_and_each_tile_one_slot(
    rows: list[tuple[int, int]], spare_tokens: int, spare_tiles: int
) -> None:
    slots, counts = [slot for slot, _ in rows], [count for _, count in rows]
    slot_of_token = [slot for slot, count in rows for _ in range(count)]
    num_tokens, needed = len(slot_of_token) + spare_tokens, count_tiles(slots, counts)
    assert needed <= most_tiles(len(slot_of_token), 4)
    tokens = AdapterTokens.of(pack_tokens(slots, counts, num_tokens, needed + spare_tiles), num_tokens)
    order, seen = tokens.order.tolist(), []
    for slot, begin, end in tokens.tiles.tolist()[:needed]:
        assert 0 < end - begin <= TILE
        assert {slot_of_token[token] for token in order[begin:end]} == {slot}
        seen += order[begin:end]
    assert seen == [token for token in order if token >= 0]
    assert sorted(seen) == [token for token, slot in enumerate(slot_of_token) if slot >= 0]
    assert len(order) == num_tokens
    assert tokens.tiles[needed:, 0].tolist() == [NO_SLOT] * spare_tiles


def test_most_tiles_are_those_of_the_most_uneven_step() -> None:
    assert most_tiles(1, 8) == 1
    assert most_tiles(8, 4) == 4
    assert most_tiles(2 * TILE + 1, 2) == 3
    assert most_tiles(4096, 8) == 64 + 7
