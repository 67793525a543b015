"""Owns the comparison of Triton's mixtures of experts whose weights have 8 or 4 bits with the reference, interpreted.
Never compares with stored numbers: every input is random, and every output and every buffer is poisoned first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.forward import Linear, Routing
from tests.kernels.experts_case import ExpertsCase, experts_case
from tests.kernels.narrow_case import narrow_experts_case, shuffled
from tests.kernels.triton.cases import TOLERANCE, poisoned, poisoned_buffers, slow
from tests.support.distances import assert_close

from kernels.triton.experts.experts import (  # isort: skip
    FEW_PAIRS,
    GATHERED,
    MANY_PAIRS,
    SOME_PAIRS,
    launch_tokens,
    narrow_experts,
)
from kernels.triton.shared.pack import Packed, pack  # isort: skip

ONE, TWO, FOUR = Routing(1, renormalize=False), Routing(2, renormalize=True), Routing(4, renormalize=True)
KINDS: list[tuple[str, int | None, bool]] = [
    ("int8", None, False),
    ("int8", 32, True),
    ("fp8", None, False),
    ("fp8", 16, False),
    ("fp8", 128, False),
    ("int4", None, True),
    ("int4", 16, True),
    ("int4", 48, False),
    ("int4", 128, True),
]
"""(kind, inputs that share a scale, whether there are zero points). Groups of 48 end within a tile of inputs."""


@pytest.fixture(autouse=True)
def _poisoned_buffers() -> Iterator[None]:
    with poisoned_buffers():
        yield


def there(linear: Linear, device: str) -> Linear:
    """Return the weight packed on the device, with the caller's own left as it is."""
    names = ("weight", "scales", "zeros", "order")
    tensors = {name: getattr(linear, name) for name in names if getattr(linear, name) is not None}
    moved = replace(linear, **{name: tensor.to(device, copy=True) for name, tensor in tensors.items()})
    return moved if linear.scales is None else pack(moved)


def check(case: ExpertsCase, gate_up: Linear, down: Linear, routing: Routing, device: str) -> Tensor:
    x, router = case.x, case.router
    out = poisoned(x.shape, x.dtype, device)
    packed = there(gate_up, device), there(down, device)
    assert narrow_experts(x.to(device), router.to(device), *packed, routing, out=out) is out
    want = reference.narrow_experts(x, router, gate_up, down, routing)
    assert_close(out.cpu(), want, atol=TOLERANCE[x.dtype], rtol=TOLERANCE[x.dtype])
    return out.cpu()


def matrices(case: ExpertsCase, kind: str, group: int | None = None, *, zeros: bool = False) -> tuple[Linear, Linear]:
    """Return random weights of the case's sizes: gate_up and down."""
    shapes = [tuple(weight.shape) for weight in (case.gate_up, case.down)]
    first, second = (narrow_experts_case(kind, *shape, group=group, zeros=zeros) for shape in shapes)
    return first, second


@pytest.mark.parametrize("tokens", [3, 40, 200])
@pytest.mark.parametrize(("kind", "group", "zeros"), KINDS)
def test_each_kind_of_weight_matches_the_reference_in_each_tile(
    device: str, kind: str, group: int | None, zeros: bool, tokens: int
) -> None:
    case = experts_case(tokens, 3, hidden=160, size=96)
    firsts = launch_tokens(3, ONE)
    assert sum(first <= tokens for first in firsts) == 1 + (3, 40, 200).index(tokens)
    check(case, *matrices(case, kind, group, zeros=zeros), ONE, device)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_activations_of_each_type_match_the_reference(device: str, kind: str, dtype: torch.dtype) -> None:
    case = experts_case(5, 4, hidden=64, size=32, dtype=dtype)
    check(case, *matrices(case, kind, 32), TWO, device)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("count", [1, FEW_PAIRS, FEW_PAIRS + 1, SOME_PAIRS + 1, 3 * MANY_PAIRS + 1])
def test_an_expert_with_all_tokens_matches_the_reference_at_the_edges_of_a_tile(
    device: str, kind: str, count: int
) -> None:
    case = experts_case(count, 5, hidden=48, size=32, favoured=(3,))
    assert set(reference.route(case.x, case.router, ONE)[1].flatten().tolist()) == {3}
    check(case, *matrices(case, kind, 16, zeros=True), ONE, device)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_weights_of_experts_without_tokens_are_not_read(device: str, kind: str) -> None:
    case = experts_case(9, 16, hidden=48, size=32, favoured=(2, 11))
    assert set(reference.route(case.x, case.router, TWO)[1].flatten().tolist()) == {2, 11}
    pair = matrices(case, kind, 16)
    for linear in pair:
        linear.scales[[number for number in range(16) if number not in (2, 11)]] = torch.nan
    check(case, *pair, TWO, device)


@pytest.mark.parametrize(("hidden", "size"), [(16, 16), (34, 18), (66, 62), (130, 34), slow(258, 514)])
@pytest.mark.parametrize(("kind", "group"), [("int8", None), ("fp8", 32), ("int4", None), ("int4", 64)])
def test_sizes_that_fill_no_block_match_the_reference(
    device: str, kind: str, group: int | None, hidden: int, size: int
) -> None:
    case = experts_case(5, 4, hidden=hidden, size=size)
    check(case, *matrices(case, kind, group), TWO, device)


@pytest.mark.parametrize("narrow", [0, 1])
def test_one_of_the_two_weights_may_have_the_type_of_activations(device: str, narrow: int) -> None:
    case = experts_case(7, 4, hidden=64, size=48)
    pair = list(matrices(case, "int4", 16, zeros=True))
    pair[1 - narrow] = Linear((case.gate_up, case.down)[1 - narrow])
    check(case, *pair, TWO, device)


def test_more_experts_for_a_token_than_there_are_tokens_match_the_reference(device: str) -> None:
    case = experts_case(1, 6, hidden=64, size=48)
    check(case, *matrices(case, "int8"), FOUR, device)


@pytest.mark.parametrize("tokens", [3, 70])
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)], ids=["gate and up", "down", "both"])
def test_inputs_in_the_order_of_each_experts_groups_match_the_reference(
    device: str, which: tuple[int, ...], tokens: int
) -> None:
    case = experts_case(tokens, 4, hidden=GATHERED + 32, size=48)
    pair = list(matrices(case, "int4", 16, zeros=True))
    for place in which:
        pair[place] = shuffled(pair[place])
        assert not torch.equal(pair[place].order[0], pair[place].order[1]), "each expert has its own"
    check(case, *pair, TWO, device)


def test_no_tokens_are_no_launch(device: str) -> None:
    case = experts_case(1, 4, hidden=64, size=48)
    first, second = (there(linear, device) for linear in matrices(case, "int8"))
    assert narrow_experts(case.x[:0].to(device), case.router.to(device), first, second, TWO).shape == (0, 64)


@pytest.mark.parametrize(("kind", "inputs", "stays"), [("int8", 64, True), ("int8", 40, False), ("int4", 128, True)])
def test_packed_experts_stay_in_their_memory_where_runs_are_whole(
    device: str, kind: str, inputs: int, stays: bool
) -> None:
    linear = narrow_experts_case(kind, 3, 24, inputs, group=16, zeros=True)
    stored = linear.weight.to(device)
    found: Packed = pack(replace(linear, weight=stored)).weight
    assert (found.words.data_ptr() == stored.data_ptr()) is stays
    assert found.words.shape[:2] == (3, 24)
    assert found.scales is not None
    assert found.zeros is not None
    assert found.scales.shape == found.zeros.shape == (3, -(-inputs // 16), 24)


def test_packed_experts_hold_the_numbers_of_each_expert_packed_alone(device: str) -> None:
    linear = narrow_experts_case("int4", 3, 24, 72, group=16)
    found: Packed = there(linear, device).weight
    for number in range(3):
        alone: Packed = there(linear.of_expert(number), device).weight
        assert torch.equal(found.words[number], alone.words)
        assert found.scales is not None
        assert alone.scales is not None
        assert torch.equal(found.scales[number], alone.scales)
