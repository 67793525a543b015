"""Named loads, simulated: they ask as they ask a server, and are judged and reported like loads of a server."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from loadtest.plan import Closed, Plan
from loadtest.sim.driver import PlanDriver, job_of
from loadtest.sim.load import check, main, parser
from loadtest.sim.routers import ROUTERS
from loadtest.sim.scenario import Scenario
from loadtest.sim.simulation import simulate
from loadtest.sim.world import World
from loadtest.slo import MISSED, PASSED
from loadtest.timeline import Timeline
from loadtest.workloads import WORKLOADS
from tests.support.sim_worlds import STEP_S, scenario

TRACE = Path(__file__).parents[1] / "traces" / "mooncake_sample.jsonl"
SHORT = ("--seconds", "5", "--lengths", "0.1", "--seed", "1", "--goal", "")
ROOMY = {"max_num_batched_tokens": 512, "max_prefill_tokens": 512, "num_kv_blocks": 4096}


def plan_of(*arguments: str) -> Plan:
    return check(parser().parse_args(list(arguments)))[0]


def world_of(plan: Plan, answers: list[Timeline] | None = None, **settings: Any) -> World:
    """Make engines whose steps take STEP_S each."""
    made: Scenario = scenario([], config=ROOMY, duration_s=sum(point.seconds for point in plan.points), **settings)

    async def send(world: World) -> None:
        await PlanDriver(plan, world, made.seed).run()

    return simulate(made, send=send, on_answer=(answers if answers is not None else []).append)[1]


def simulated(out: Path, *arguments: str) -> dict[str, Any]:
    """Return the report of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(out), *SHORT, *arguments])
    found: dict[str, Any] = json.loads((out / "report.json").read_text())
    assert ended.value.code == found["exit_code"]
    return found


def test_requests_come_when_a_servers_would_and_ask_for_the_same() -> None:
    plan = plan_of("--scenario", "rates", "--rate", "4", *SHORT)
    answers: list[Timeline] = []
    world_of(plan, answers, seed=7)
    (source,) = plan.points[0].sources
    assert not isinstance(source, Closed)
    asked = list(source.due("7 0", 0, 1))
    assert sorted(answer.due for answer in answers) == pytest.approx([at for at, _ in asked])
    assert sum(answer.prompt_tokens for answer in answers) == sum(one.asked_tokens for _, one in asked)
    assert {answer.output_tokens for answer in answers} == {10}


def test_a_closed_loads_clients_ask_again_when_they_are_answered_until_the_point_ends() -> None:
    plan = plan_of("--scenario", "sweep", "--clients", "2", "--seconds", "1.9", "--lengths", "0.01")
    world = world_of(plan)
    for point in plan.points:
        figures = world.tally.figures(point.name)
        steps = {"1000/1000": 10, "8000/1000": 10, "1000/8000": 80}[point.line]
        rounds = math.ceil(1.9 / (steps * STEP_S))
        assert figures["ok"] == figures["offered"] == 2 * rounds, point.name
        assert figures["e2e_max_ms"] == pytest.approx(1e3 * steps * STEP_S)


def test_a_point_begins_when_the_last_answer_of_the_one_before_has_ended() -> None:
    answers: list[Timeline] = []
    plan = plan_of("--scenario", "sweep", "--clients", "1", "--seconds", "1", "--lengths", "0.01")
    world_of(plan, answers)
    ended = 0.0
    for answer in answers:  # with one client
        assert answer.due == pytest.approx(ended)
        ended = answer.ended


def test_prompts_that_begin_with_the_same_words_are_found_in_the_cache() -> None:
    shared = world_of(plan_of("--scenario", "prefix", "--rate", "8", *SHORT))
    apart = world_of(plan_of("--scenario", "rates", "--rate", "8", *SHORT))
    assert shared.num_cached_tokens > 0.3 * shared.num_prompt_tokens
    assert apart.num_cached_tokens == 0


def test_a_conversation_grows_and_finds_what_was_asked_before() -> None:
    answers: list[Timeline] = []
    plan = plan_of("--scenario", "sessions", "--clients", "1", "--seconds", "60", "--lengths", "1", "--seed", "1")
    world = world_of(plan, answers)
    first, second, *_ = answers
    assert second.prompt_tokens == first.prompt_tokens + first.output_tokens + first.prompt_tokens
    assert world.num_cached_tokens > 0


def test_a_word_is_a_token_and_the_same_one_each_time() -> None:
    (source,) = plan_of("--scenario", "smoke", "--seconds", "3").points[0].sources
    assert not isinstance(source, Closed)
    (_, one), (_, other) = list(source.due("1", 0, 1))[:2]
    job = job_of(one)
    assert (job.num_prompt_tokens, job.num_answer_tokens) == (32, 16)
    words = one.body["prompt"].split()
    assert len(set(job.words)) == len(set(words))
    assert job == job_of(one) != job_of(other)


def test_the_command_judges_and_reports_as_for_a_server(tmp_path: Path) -> None:
    found = simulated(tmp_path, "--scenario", "rates", "--rates", "1,2", "--replicas", "2")
    assert (found["exit_code"], [point["x"] for point in found["points"]]) == (PASSED, [1.0, 2.0])
    assert found["settings"]["replicas"] == 2
    assert found["deployment"]["replica_hours"] * 3600 == pytest.approx(2 * 10)
    assert "Goodput against load" in (tmp_path / "report.html").read_text()
    missed = simulated(tmp_path, "--scenario", "rates", "--rates", "1,2", "--limits", "ttft_p99_ms<=1")
    assert (missed["exit_code"], len(missed["missed"])) == (MISSED, 2)


@pytest.mark.parametrize("router", ROUTERS)
def test_the_same_seed_gives_the_same_report(tmp_path: Path, router: str) -> None:
    asked = ("--scenario", "prefix", "--replicas", "3", "--router", router)
    assert simulated(tmp_path, *asked) == simulated(tmp_path, *asked)


def test_settings_of_the_engines_are_theirs(tmp_path: Path) -> None:
    """A prompt of 50 tokens takes two steps of 40, the first of which ends with a block."""
    asked = ("--scenario", "rates", "--rate", "0.5", "--arrivals", "constant", "--warm-up", "0")
    whole = simulated(tmp_path, *asked)
    cut = simulated(tmp_path, *asked, "--engine", "max_num_batched_tokens=49,max_prefill_tokens=40,max_num_seqs=8")
    assert cut["deployment"]["steps"] == whole["deployment"]["steps"] + whole["points"][0]["figures"]["ok"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--scenario", "cancel"], "cancel is not simulated: its clients leave"),
        (["--scenario", "slow-readers"], "its clients read slowly"),
        (["--scenario", "soak"], "what the server holds afterwards"),
        (["--scenario", "replica-kill"], "needs --do"),
        (["--scenario", "replica-kill", "--do", "true"], "--do needs a real server"),
        (["--scenario", "tenants", "--keys", "a=1,b=2"], "--keys needs a real server"),
        (["--max-lag-ms", "9"], "--max-lag-ms needs a real server"),
        (["--replicas", "0"], "--replicas is 1 or more, not 0"),
        (["--engine", "max_num_seqs"], "--engine is NAME=NUMBER"),
        (["--engine", "kernels=3"], "--engine is NAME=NUMBER"),
        (["--engine", "max_num_batched_tokens=32"], "max_num_batched_tokens (32) must be at least max_num_seqs"),
        (["--rate", "-1"], "--rate is a positive number"),
    ],
)
def test_what_is_not_simulated_is_refused_and_nothing_is_left_out(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--out", str(tmp_path / "out"), *arguments])
    assert refused.value.code == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_all_other_loads_are_simulated() -> None:
    not_simulated = {"cancel", "slow-readers", "soak", "tenants"}
    for name, workload in WORKLOADS.items():
        if name not in not_simulated and not workload.needs_command:
            trace = ["--trace", str(TRACE), "--lengths", "0.1"] if name == "trace" else []
            assert plan_of("--scenario", name, *trace).points
