"""The contract of ranks, on each kind of group: sums to the bit, columns, messages, and the end when a rank is lost.
Never depends on time: a limit is far longer than what it limits."""

from __future__ import annotations

import signal

import pytest
import torch
from torch import Tensor

from tests.kernels.collectives import jobs
from tests.kernels.collectives.conftest import Make
from tests.support.ranks import LostResult, ranks, run_ranks
from tests.support.seeds import next_seed

IN_A_SLOT = jobs.SLOT_BYTES // 4
SIZES = [pytest.param(2, marks=pytest.mark.slow), 4]
SHAPES = [
    (1,),
    (15,),
    (16,),
    (17,),
    (3, 33),
    (IN_A_SLOT - 1,),
    (IN_A_SLOT,),
    (IN_A_SLOT + 1,),
    (5, 2 * IN_A_SLOT),
    (0, 7),
]


def in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_get_the_sum_in_the_order_of_ranks_rounded_once(
    exact_group: Make, size: int, dtype: torch.dtype
) -> None:
    seed = next_seed() % 1000
    found = run_ranks(exact_group(), size, jobs.sums, SHAPES, dtype, seed)
    found_order = False
    for number, shape in enumerate(SHAPES):
        parts = [jobs.numbers_of(rank, shape, dtype, seed) for rank in range(size)]
        for rank in range(size):
            assert torch.equal(found[rank][number], in_order(parts)), f"rank {rank}, {shape}"
        found_order |= not torch.equal(in_order(parts[::-1]), in_order(parts))
    assert found_order or size == 2, "these numbers show no order"


def test_a_number_s_sum_is_the_same_wherever_it_lies(exact_group: Make) -> None:
    """A denormal is where a vector's rounding may differ from a single number's."""
    found = run_ranks(exact_group(), 2, jobs.sums_of_one_number, 1.5e-39, 70)
    for sums in found:
        assert len(set(sums.view(torch.int16).tolist())) == 1


@pytest.mark.parametrize("size", SIZES)
def test_the_leader_gets_the_columns_of_all_ranks_beside_each_other(group: Make, size: int) -> None:
    wide = IN_A_SLOT + 3
    cases = [(1, [1] * size), (3, [5, 2, 7, 1][:size]), (2, [wide, 1, 2 * wide, 9][:size]), (0, [3] * size)]
    cases.append((700, [0, 3, 1, 2][:size]))
    seed = next_seed() % 1000
    found = run_ranks(group(), size, jobs.gathers, cases, seed)
    for number, (rows, sizes) in enumerate(cases):
        parts = [jobs.numbers_of(rank, (rows, sizes[rank]), torch.float32, seed) for rank in range(size)]
        assert torch.equal(found[0][number], torch.cat(parts, 1))
        assert all(others[number] is None for others in found[1:])


@pytest.mark.parametrize("size", SIZES)
def test_messages_of_any_size_arrive_whole_and_in_order(group: Make, size: int) -> None:
    large = jobs.MESSAGE_BYTES
    sizes = [0, 1, 100, large - 1, large, large + 1, 0, 10 * large + 7, 3]
    first, *others = run_ranks(group(), size, jobs.messages, sizes, next_seed() % 1000)
    assert [len(message) for message in first] == sizes
    assert all(received == first for received in others)


def test_a_message_does_not_wait_until_the_one_before_was_received(group: Make, tmp_path: object) -> None:
    _, received = run_ranks(group(), 2, jobs.send_before_anyone_listens, f"{tmp_path}/gate")
    assert received == [b"first", b"second"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rounds", [100, pytest.param(2_000, marks=pytest.mark.slow)])
def test_rounds_with_random_delays_neither_stop_nor_mix(group: Make, size: int, rounds: int) -> None:
    assert run_ranks(group(), size, jobs.many_rounds, rounds, next_seed() % 1000) == [0] * size


@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_are_left_name_the_rank_that_was_killed(group: Make, size: int) -> None:
    for lost in range(size):
        with ranks(group(), size, jobs.sums_until_lost) as started:
            for rank in range(size):
                started.told(rank)
            started.signal(lost, signal.SIGKILL)
            for message in started.results(lost):
                assert isinstance(message, LostResult)
                assert message == f"Rank {lost} has died."


def test_a_listener_learns_that_the_leader_was_killed_and_waits_for_no_timeout_before(group: Make) -> None:
    with ranks(group(1.0), 3, jobs.listen_until_lost) as started:
        for rank in range(3):
            started.told(rank)
        with pytest.raises(TimeoutError):
            started.told(1, 2.0)  # twice as long as ranks wait for each other
        started.signal(0, signal.SIGKILL)
        assert started.results(0) == [LostResult("Rank 0 has died.")] * 2


def test_a_listener_learns_that_another_listener_was_killed(group: Make) -> None:
    with ranks(group(), 3, jobs.listen_until_lost) as started:
        for rank in range(3):
            started.told(rank)
        started.signal(2, signal.SIGKILL)
        assert started.told(1) == "Rank 2 has died."


def test_a_rank_that_does_not_arrive_is_lost_after_the_timeout_and_learns_it(exact_group: Make) -> None:
    with ranks(exact_group(0.7), 3, jobs.sums_until_lost) as started:
        for rank in range(3):
            started.told(rank)
        started.signal(1, signal.SIGSTOP)
        for message in started.results(1):
            assert isinstance(message, LostResult)
            assert message == "Rank 1 did not arrive within 0.7 s."
        started.signal(1, signal.SIGCONT)
        assert started.told(1) == "Rank 1 did not arrive within 0.7 s."


def test_a_leader_that_is_not_listened_to_names_the_rank(group: Make) -> None:
    with ranks(group(0.7), 2, jobs.send_until_lost) as started:
        started.told(0)
        assert started.told(0) == "Rank 1 did not receive a message within 0.7 s."


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_gives_up_tells_all_others_why(group: Make, who: int) -> None:
    found = run_ranks(group(), 3, jobs.give_up_alone, who)
    assert found == [f"Rank {who} gave up: no memory."] * 3


def test_an_idle_leader_learns_by_a_check_that_a_rank_has_died(group: Make) -> None:
    with ranks(group(), 2, jobs.check_until_lost) as started:
        started.told(0)
        started.told(1)
        started.signal(1, signal.SIGKILL)
        assert started.told(0) == LostResult("Rank 1 has died.")


def test_what_the_leader_sent_before_it_left_is_received(group: Make) -> None:
    assert run_ranks(group(), 3, jobs.leave_after_the_last_message) == [b"", b"stop", b"stop"]
