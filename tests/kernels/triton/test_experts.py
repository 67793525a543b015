"""Owns the comparison of Triton's mixtures of experts with the reference, in the interpreter.
Never compares with stored numbers: every input is random, and every output and every buffer is poisoned first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.forward import Routing
from tests.kernels.experts_case import ExpertsCase, exact_case, experts_case
from tests.kernels.rows import seeded_generator
from tests.kernels.triton.cases import POISON, TOLERANCE, close, poisoned, poisoned_buffers, slow

from kernels.triton.experts.experts import (  # isort: skip
    BLOCK,
    FEW_PAIRS,
    MANY_PAIRS,
    MOST_FOR_SOME,
    SOME_PAIRS,
    experts,
    launch_tokens,
    tile_of,
)
from kernels.triton.experts.routing import PAIRS_AT_A_TIME, choose_experts, most_tiles, sort_pairs  # isort: skip

ONE, TWO, EIGHT = Routing(1, renormalize=False), Routing(2, renormalize=True), Routing(8, renormalize=True)


@pytest.fixture(autouse=True)
def _poisoned_buffers() -> Iterator[None]:
    with poisoned_buffers():
        yield


def check(case: ExpertsCase, device: str, routing: Routing) -> Tensor:
    out = poisoned(case.x.shape, case.x.dtype, device)
    assert experts(*case.to(device), routing, out=out) is out
    close(out, reference.experts(*case, routing))
    return out.cpu()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("routing", [ONE, TWO, EIGHT], ids=str)
def test_experts_match_the_reference(device: str, routing: Routing, dtype: torch.dtype) -> None:
    check(experts_case(7, 12, dtype=dtype), device, routing)


@pytest.mark.parametrize(
    ("tokens", "num_experts", "routing"),
    [(1, 9, ONE), (1, 8, EIGHT), (2, 1, ONE), (3, 2, TWO), (SOME_PAIRS + 1, 3, TWO), slow(70, 40, EIGHT)],
    ids=str,
)
def test_few_tokens_and_every_expert_at_once_match_the_reference(
    device: str, tokens: int, num_experts: int, routing: Routing
) -> None:
    check(experts_case(tokens, num_experts), device, routing)


@pytest.mark.parametrize(
    ("tile", "count"),
    [
        *((FEW_PAIRS, count) for count in (1, FEW_PAIRS - 1, FEW_PAIRS, FEW_PAIRS + 1)),
        *((SOME_PAIRS, count) for count in (SOME_PAIRS - 1, SOME_PAIRS, SOME_PAIRS + 1, 2 * SOME_PAIRS)),
        *((MANY_PAIRS, count) for count in (3 * MANY_PAIRS - 1, 3 * MANY_PAIRS, 3 * MANY_PAIRS + 1)),
    ],
)
def test_all_tokens_to_one_expert_match_the_reference_at_the_edges_of_a_tile(
    device: str, tile: int, count: int
) -> None:
    case = experts_case(count, 5, favoured=(3,))
    assert tile_of(count, 5) == tile
    assert set(reference.route(case.x, case.router, ONE)[1].flatten().tolist()) == {3}
    check(case, device, ONE)


def test_experts_without_tokens_are_passed_over(device: str) -> None:
    case = experts_case(9, 16, favoured=(2, 11))
    assert set(reference.route(case.x, case.router, TWO)[1].flatten().tolist()) == {2, 11}
    gate_up = case.gate_up.clone()
    gate_up[[number for number in range(16) if number not in (2, 11)]] = torch.nan
    check(case._replace(gate_up=gate_up), device, TWO)


@pytest.mark.parametrize(("hidden", "size"), [(16, 16), (17, 9), (65, 63), slow(129, 257)])
def test_sizes_that_fill_no_block_match_the_reference(device: str, hidden: int, size: int) -> None:
    check(experts_case(5, 4, hidden=hidden, size=size), device, TWO)


def test_a_hidden_state_wider_than_a_program_of_the_sum_matches_the_reference(device: str) -> None:
    check(experts_case(2, 2, hidden=BLOCK + 3, size=4), device, TWO)


def test_tokens_may_lie_in_a_wider_matrix(device: str) -> None:
    case = experts_case(6, 4)
    wide = torch.cat((torch.full((6, 3), torch.nan), case.x, torch.full((6, 2), torch.nan)), dim=1).to(device)
    _, *weights = case.to(device)
    close(experts(wide[:, 3:-2], *weights, TWO), reference.experts(*case, TWO))


def test_weights_that_lie_otherwise_are_refused_by_name(device: str) -> None:
    x, router, gate_up, down = experts_case(2, 4).to(device)
    with pytest.raises(ValueError, match=r"down \[4, 24, 32\] has strides .*: expected a contiguous tensor"):
        experts(x, router, gate_up, down.transpose(1, 2), TWO)


def test_no_tokens_are_no_launch(device: str) -> None:
    x, *weights = experts_case(1, 4).to(device)
    assert experts(x[:0], *weights, TWO).shape == (0, 32)


@pytest.mark.parametrize("what", [torch.nan, torch.inf, POISON])
def test_padding_changes_no_token(device: str, what: float) -> None:
    """Padding tokens hold anything, and share tiles with real ones; a real token's sum is the same to the bit.

    On a GPU that holds for any values (tests/gpu/test_experts.py). The interpreter multiplies with NumPy, whose BLAS
    may add up one row in another order than the next: four tests failed on AMD processors only.
    """
    case = exact_case(6, 3)
    x, *weights = case.to(device)
    alone = experts(x, *weights, TWO)
    close(alone, reference.experts(*case, TWO))
    padded = torch.full((38, 32), what, device=device)
    places = torch.tensor([0, 1, 17, 31, 32, 37], device=device)
    padded[places] = x
    out = poisoned(padded.shape, torch.float32, device)
    experts(padded, *weights, TWO, out=out)
    assert torch.equal(out[places], alone)


def test_a_token_of_no_numbers_spoils_no_other_and_is_none_itself(device: str) -> None:
    case = experts_case(12, 4)
    x = case.x.clone()
    x[5] = torch.nan
    got = experts(*case._replace(x=x).to(device), TWO).cpu()
    want = reference.experts(*case, TWO)
    others = [token for token in range(12) if token != 5]
    close(got[others], want[others])
    assert got[5].isnan().all()


# --- the choice, and the order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("routing", [ONE, TWO, EIGHT, Routing(3, renormalize=False)], ids=str)
@pytest.mark.parametrize(("tokens", "num_experts"), [(1, 8), (33, 60), slow(65, 129)])
def test_the_choice_is_that_of_the_reference(
    device: str, tokens: int, num_experts: int, routing: Routing, dtype: torch.dtype
) -> None:
    case = experts_case(tokens, num_experts, hidden=72, dtype=dtype)
    shares, chosen = choose_experts(case.x.to(device), case.router.to(device), routing)
    wanted, numbers = reference.route(case.x, case.router, routing)
    assert chosen.tolist() == numbers.tolist()
    torch.testing.assert_close(shares.cpu(), wanted, atol=1e-5, rtol=1e-5)


def test_equal_shares_go_to_the_lower_number(device: str) -> None:
    x, router = torch.ones(2, 16, device=device), torch.ones(20, 16, device=device)
    router[7] = 2
    shares, chosen = choose_experts(x, router, EIGHT)
    assert chosen.tolist() == [[7, 0, 1, 2, 3, 4, 5, 6]] * 2
    torch.testing.assert_close(shares[:, 1:].cpu(), shares[:, 1:2].cpu().expand(2, 7))


@pytest.mark.parametrize("what", [torch.nan, torch.inf, -torch.inf])
def test_a_token_of_no_numbers_still_has_experts(device: str, what: float) -> None:
    _, router, *_ = experts_case(1, 9).to(device)
    _, chosen = choose_experts(torch.full((1, 32), what, device=device), router, EIGHT)
    assert len({number for number in chosen[0].tolist() if 0 <= number < 9}) == 8


@pytest.mark.parametrize("tile", [FEW_PAIRS, MANY_PAIRS])
@pytest.mark.parametrize(
    ("tokens", "per_token", "num_experts"),
    [(1, 2, 16), (5, 1, 1), (40, 2, 3), (PAIRS_AT_A_TIME // 2, 2, 5), (PAIRS_AT_A_TIME + 1, 3, 7)],
)
def test_pairs_are_in_the_order_of_their_experts_and_every_tile_has_one_expert(
    device: str, tokens: int, per_token: int, num_experts: int, tile: int
) -> None:
    drawn = torch.rand(tokens, num_experts, generator=seeded_generator()) + torch.arange(num_experts) / num_experts
    chosen = drawn.topk(per_token).indices
    order, tiles = sort_pairs(chosen.int().to(device), num_experts, tile)
    assert order.tolist() == chosen.flatten().argsort(stable=True).tolist()
    want = []
    for number, count in enumerate(chosen.flatten().bincount(minlength=num_experts).tolist()):
        begin = int((chosen < number).sum())
        want += [[number, begin + at, begin + min(at + tile, count)] for at in range(0, count, tile)]
    assert tiles[: len(want)].tolist() == want
    assert all(expert == -1 for expert, *_ in tiles[len(want) :].tolist())


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.sampled_from([1, 4, 16]))
@settings(max_examples=200, deadline=None)
def test_there_is_room_for_the_tiles_of_any_choice(counts: list[int], tile: int) -> None:
    needed = sum(-(-count // tile) for count in counts)
    assert needed <= most_tiles(sum(counts), len(counts), tile)


def test_the_most_uneven_choice_fills_the_list() -> None:
    assert most_tiles(8, 128, 64) == 8, "eight experts with a pair each"
    assert most_tiles(64 + 64 + 1, 2, 64) == 3
    assert most_tiles(4096 * 8, 128, 64) == 512 + 126


@pytest.mark.parametrize(("num_experts", "routing"), [(128, EIGHT), (8, TWO), (5, ONE), (1, ONE)], ids=str)
def test_each_launch_has_a_number_of_tokens_with_which_it_begins(num_experts: int, routing: Routing) -> None:
    firsts = launch_tokens(num_experts, routing)
    tiles = [tile_of(tokens * routing.per_token, num_experts) for tokens in firsts]
    assert tiles == [FEW_PAIRS, SOME_PAIRS, MANY_PAIRS]
    before = [tile_of((tokens - 1) * routing.per_token, num_experts) for tokens in firsts[1:]]
    assert before == tiles[:-1]


def test_an_expert_with_many_pairs_has_larger_tiles_than_sixty_four() -> None:
    assert tile_of(2048 * 8, 128) == MANY_PAIRS > 64
    assert tile_of(MOST_FOR_SOME * 128, 128) == SOME_PAIRS


def test_the_choice_of_a_token_does_not_depend_on_its_neighbours(device: str) -> None:
    """It is the same to the bit, here for integers because of the interpreter, as above."""
    case = exact_case(40, 9)
    x, router = case.x.to(device), case.router.to(device)
    whole = choose_experts(x, router, TWO)
    for token in (0, 31, 39):
        alone = choose_experts(x[token : token + 1], router, TWO)
        for found, expected in zip(alone, whole, strict=True):
            assert torch.equal(found[0], expected[token])
