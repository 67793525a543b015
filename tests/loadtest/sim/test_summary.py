"""A simulation is summed up and reported as a load of a real server is."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

from loadtest.page import page
from loadtest.plan import Plan, Point
from loadtest.report import Generator, RunEvents, document_of
from loadtest.sim.recording import Recording
from loadtest.sim.simulation import simulate
from loadtest.sim.summary import NOTE, deployment_figures, report
from loadtest.sim.workload import Job, poisson
from loadtest.sim.world import POINT, World
from loadtest.slo import PASSED, Goal
from loadtest.tally import Tally
from loadtest.timeline import OK, Timeline
from tests.support.sim_worlds import STEP_S, scenario

JOBS = poisson(4.0, 20, num_prompt_tokens=40, num_answer_tokens=10, seed=1)


def of_a_load(answers: list[Timeline], goal: Goal, seconds: float) -> Tally:
    """Return what the load generator would make of the same answers."""
    found = Tally(goal)
    found.open_window(POINT, seconds)
    for answer in answers:
        found.record(POINT, "chat", answer, (0.0, seconds))
    return found


def test_the_figures_are_those_of_a_load_with_the_same_answers() -> None:
    answers: list[Timeline] = []
    asked = scenario(JOBS)
    figures, world = simulate(asked, on_answer=answers.append)
    expected = of_a_load(answers, asked.goal, world.duration_s).figures(POINT)
    assert {name: figures[name] for name in expected} == expected
    assert figures["offered"] == len(JOBS)
    assert figures.keys() == expected.keys() | deployment_figures(world).keys()


def test_goodput_is_of_the_time_in_which_requests_came() -> None:
    """One answer is good. The other's first token comes after three steps of its own, and waits for nothing else."""
    jobs = [Job(0.0, 10, 2), Job(5.0, 150, 2)]
    asked = scenario(jobs, goal=Goal(ttft_ms=2.5 * STEP_S * 1000, tpot_ms=None), duration_s=10.0)
    figures, _ = simulate(asked)
    assert (figures["good_share"], figures["goodput_per_s"], figures["offered_per_s"]) == (0.5, 0.1, 0.2)


def test_a_report_has_what_a_loads_has_and_what_the_deployment_did(tmp_path: Path) -> None:
    async def happen(world: World) -> None:
        await asyncio.sleep(3.0)
        world.happened.append((world.loop.time(), "nothing at all"))

    _, world = simulate(scenario(JOBS), happening=happen)
    found: dict[str, Any] = json.loads(json.dumps(report(world, "tests", {"seed": 1})))
    live = document_of(Plan((Point("a", (), 1.0),)), Tally(), Generator(1, 0.0, 90.0, 50.0), RunEvents(), {})
    assert found.keys() == live.keys() | {"deployment"}
    assert found["points"][0].keys() == live["points"][0].keys()
    assert (found["exit_code"], found["saturated"], found["notes"]) == (PASSED, [], [NOTE])
    assert found["deployment"] == deployment_figures(world)
    assert found["happened"] == [{"at_s": 3.0, "command": "nothing at all"}]
    assert found["finish_reasons"] == {"length": len(JOBS)}


def test_the_page_of_a_report_says_that_it_is_simulated_and_what_it_cost() -> None:
    _, world = simulate(scenario(JOBS))
    text = page(report(world, "tests", {"seed": 1}))
    assert "Load tests on simulated engines" in text
    assert NOTE in text
    assert "<h2>Deployment</h2>" in text
    assert "replica_hours" in text
    assert "Latency over time" in text


def test_answers_that_have_ended_are_not_kept() -> None:
    """A million of them would take the memory that the replicas need."""
    before = num_kept()
    _, world = simulate(scenario(JOBS))
    assert world.tally.whole().counts[OK] == len(JOBS)
    assert num_kept() <= before


def num_kept() -> int:
    gc.collect()
    # By type: what other tests have imported may warn, or import more, when it is asked for its class.
    return sum(type(thing) in (Timeline, Recording) for thing in gc.get_objects())
