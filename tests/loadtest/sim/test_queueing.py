"""What queueing theory says has to hold, whatever the scheduler does."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from loadtest.sim.simulation import simulate
from loadtest.sim.workload import Job, poisson
from loadtest.sim.world import World
from loadtest.timeline import Timeline
from tests.support.sim_worlds import STEP_S, scenario

ONE_SEAT = {"max_num_seqs": 1, "max_num_batched_tokens": 2, "max_prefill_tokens": 2, "max_queued_requests": 100_000}


def lindley(arrivals: list[float], service_s: float) -> list[float]:
    """Return the waits in a queue of one server whose service takes a fixed time (Lindley, 1952)."""
    waits = [0.0]
    for before, after in pairwise(arrivals):
        waits.append(max(0.0, waits[-1] + service_s - (after - before)))
    return waits


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_seat_and_one_step_for_each_request_is_an_m_d_1_queue(load: float) -> None:
    """The waits are compared one by one with Lindley's, and their mean with the Pollaczek-Khinchine formula."""
    jobs = poisson(load / STEP_S, 80, num_prompt_tokens=1, num_answer_tokens=1, seed=3)
    answers: list[Timeline] = []
    simulate(scenario(jobs, config=ONE_SEAT), on_answer=answers.append)
    waits = [answer.queue_ms / 1e3 for answer in answers if answer.queue_ms is not None]
    assert waits == pytest.approx(lindley([job.arrival_s for job in jobs], STEP_S), abs=1e-6)
    pollaczek_khinchine = load * STEP_S / (2 * (1 - load))
    many = lindley([job.arrival_s for job in poisson(load / STEP_S, 15_000, 1, 1, seed=4)], STEP_S)
    assert sum(many) / len(many) == pytest.approx(pollaczek_khinchine, rel=0.05)


def test_a_request_alone_takes_one_step_for_each_chunk_and_each_further_token() -> None:
    figures, _ = simulate(scenario([Job(1.0, num_prompt_tokens=150, num_answer_tokens=5)]))
    assert figures["steps"] == 3 + 4
    assert figures["ttft_max_ms"] == pytest.approx(3 * STEP_S * 1000)
    assert figures["e2e_max_ms"] == pytest.approx(7 * STEP_S * 1000)
    assert figures["tpot_max_ms"] == pytest.approx(STEP_S * 1000)
    assert figures["queue_max_ms"] == 0


def test_littles_law_holds_between_what_is_seen_and_what_requests_say() -> None:
    jobs = poisson(6.0, 100, num_prompt_tokens=40, num_answer_tokens=12, seed=5)
    seen: list[int] = []

    async def look(world: World) -> None:
        while world.num_live or world.loop.time() < 100:
            seen.append(world.num_live)
            await asyncio.sleep(0.02)

    answers: list[Timeline] = []
    figures, _ = simulate(scenario(jobs), happening=look, on_answer=answers.append)
    spent_s = sum(answer.ended - answer.due for answer in answers)
    assert figures["ok"] == len(jobs)
    assert sum(seen) * 0.02 == pytest.approx(spent_s, rel=0.01)


def test_more_than_an_engine_can_do_waits_and_ends_after_the_last_arrival() -> None:
    jobs = poisson(1.3 / STEP_S, 20, num_prompt_tokens=1, num_answer_tokens=1, seed=1)
    figures, _ = simulate(scenario(jobs, config=ONE_SEAT))
    assert figures["ok"] == len(jobs)
    assert figures["simulated_s"] == pytest.approx(len(jobs) * STEP_S, rel=0.02)
