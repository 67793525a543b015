"""Owns the comparison of Triton's low-rank products with the reference, in the interpreter.
Never compares with stored numbers: every input is random, and all that nobody may read is poisoned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.forward import LowRankStack
from kernels.rows.adapter_tokens import NO_SLOT, TILE, AdapterTokens, count_tiles, most_tiles, pack_tokens
from tests.kernels.rows import seeded_generator
from tests.kernels.triton.cases import TOLERANCE, close, slow

from kernels.triton.low_rank.expand import OUTPUTS_AT_A_TIME, add_low_rank  # isort: skip
from kernels.triton.low_rank.shrink import SPLIT, shrink  # isort: skip

QKV = (40, 16, 16)
"""Outputs of each part."""


@pytest.fixture(autouse=True)
def _poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Poison new buffers, so that reading a part of a sum that no program wrote shows."""
    real = torch.empty
    with monkeypatch.context() as patch:
        patch.setattr("kernels.triton.low_rank.shrink.torch.empty", lambda *a, **k: real(*a, **k).fill_(torch.nan))
        yield


class LowRankCase(NamedTuple):
    y: Tensor  # [num_tokens, outputs]
    x: Tensor  # [num_tokens, inputs]
    stack: LowRankStack
    slots: list[int]
    """Each token's."""

    def want(self) -> Tensor:
        return reference.add_low_rank(self.y, self.x, self.stack, self.slots)

    def run(self, device: str, *, spare_tokens: int = 0, spare_tiles: int = 0) -> Tensor:
        """Return y with what the kernels add. The tokens are rows of one token each, and then padding of NaN."""
        counts = [1] * len(self.slots)
        tiles = count_tiles(self.slots, counts) + spare_tiles
        packed = pack_tokens(self.slots, counts, len(counts) + spare_tokens, tiles).to(device)
        y, x = (torch.cat((z, torch.full((spare_tokens, z.shape[1]), torch.nan, dtype=z.dtype))) for z in self[:2])
        y, stack = y.to(device), LowRankStack(self.stack.a.to(device), self.stack.b.to(device), self.stack.firsts)
        add_low_rank(y, x.to(device), stack, AdapterTokens.of(packed, len(counts) + spare_tokens))
        assert y[len(counts) :].isnan().all(), "padding was written"
        return y[: len(counts)].cpu()


def low_rank_case(
    slots: Sequence[int],
    *,
    inputs: int = 24,
    parts: Sequence[int] = (20,),
    ranks: int = 16,
    own_rank: int | None = None,
    num_slots: int = 4,
    dtype: torch.dtype = torch.float32,
    whole: bool = False,
) -> LowRankCase:
    """Draw a case. own_rank: that of every adapter, beyond which its ranks are zero. whole: small integers, whose sums
    are exact in float32 in any order. Slots that no token has, and tokens without an adapter, hold NaN in what the
    kernels must not read."""
    generator = seeded_generator()

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randint(-2, 3, shape, generator=generator).float()
        return (drawn if whole else torch.randn(*shape, generator=generator) * scale).to(dtype)

    outputs = sum(parts)
    a = draw(num_slots, len(parts), ranks, inputs, scale=inputs**-0.5)
    b = draw(num_slots, outputs, ranks, scale=(own_rank or ranks) ** -0.5)
    if own_rank is not None:
        a[:, :, own_rank:], b[:, :, own_rank:] = 0, 0
    unused = [slot for slot in range(num_slots) if slot not in slots]
    a[unused], b[unused] = torch.nan, torch.nan
    x, y = draw(len(slots), inputs), draw(len(slots), outputs)
    x[[token for token, slot in enumerate(slots) if slot < 0]] = torch.nan
    firsts = tuple(accumulate(parts[:-1], initial=0))
    return LowRankCase(y, x, LowRankStack(a, b, firsts), list(slots))


def mixed(count: int, num_slots: int = 4) -> list[int]:
    """Return slots in turn, so that no two neighbours have the same, with tokens of none between."""
    return [token % (num_slots + 1) - 1 for token in range(count)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("parts", [(20,), (24, 24), QKV], ids=str)
def test_products_of_every_kind_of_stack_are_those_of_the_reference(
    device: str, parts: tuple[int, ...], dtype: torch.dtype
) -> None:
    case = low_rank_case(mixed(11), parts=parts, dtype=dtype)
    close(case.run(device), case.want())


@pytest.mark.parametrize("count", [1, TILE - 1, TILE, TILE + 1, 2 * TILE])
def test_tokens_of_one_adapter_at_the_edges_of_a_tile_are_those_of_the_reference(device: str, count: int) -> None:
    case = low_rank_case([2] * count)
    close(case.run(device), case.want())


@pytest.mark.parametrize("ranks", [16, 48, 64, 80, slow(256)])
@pytest.mark.parametrize("own_rank", [1, 8, None], ids=str)
def test_ranks_below_and_beyond_a_program_are_those_of_the_reference(
    device: str, ranks: int, own_rank: int | None
) -> None:
    case = low_rank_case(mixed(7), ranks=ranks, own_rank=own_rank, parts=QKV)
    close(case.run(device), case.want())


@pytest.mark.parametrize("inputs", [1, 63, 65, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 100])
def test_inputs_at_the_edges_of_a_split_are_those_of_the_reference(device: str, inputs: int) -> None:
    case = low_rank_case(mixed(5), inputs=inputs)
    close(case.run(device), case.want())


@pytest.mark.parametrize(
    "parts",
    [(1,), (OUTPUTS_AT_A_TIME - 1,), (OUTPUTS_AT_A_TIME, OUTPUTS_AT_A_TIME + 1), (130, 1, 257)],
    ids=str,
)
def test_outputs_at_the_edges_of_a_tile_are_those_of_the_reference(device: str, parts: tuple[int, ...]) -> None:
    case = low_rank_case(mixed(5), parts=parts)
    close(case.run(device), case.want())


def test_every_slot_at_once_is_that_of_the_reference(device: str) -> None:
    case = low_rank_case([3, 0, 1, 2, 2, 0, 3, 1] * 20)
    close(case.run(device), case.want())


def test_tokens_without_an_adapter_keep_every_bit(device: str) -> None:
    case = low_rank_case(mixed(40))
    got = case.run(device)
    without = [token for token, slot in enumerate(case.slots) if slot == NO_SLOT]
    assert len(without) == 8
    assert torch.equal(got[without], case.y[without])


def test_a_step_in_which_no_token_has_an_adapter_changes_nothing(device: str) -> None:
    case = low_rank_case([NO_SLOT] * 5)
    assert torch.equal(case.run(device, spare_tokens=3, spare_tiles=4), case.y)


def test_padding_and_neighbours_change_no_token(device: str) -> None:
    """Whole numbers, because the interpreter's BLAS may add up one row in another order than the next."""
    case = low_rank_case(mixed(70), parts=QKV, inputs=SPLIT + 30, whole=True)
    got = case.run(device, spare_tokens=6, spare_tiles=3)
    assert torch.equal(got, case.want())
    for token in (1, 5, 69):
        alone = case._replace(x=case.x[token:][:1], y=case.y[token:][:1], slots=case.slots[token:][:1])
        assert torch.equal(alone.run(device)[0], got[token])


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
    close(case._replace(stack=LowRankStack(*views, case.stack.firsts)).run(device), case.want())


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
