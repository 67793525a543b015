"""What engines predict, as the gate uses it: when there is room, and which deadlines cannot be met."""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random

import pytest

from engine.protocol import SURELY_LATE, EngineError, ErrorCode, PrefillCosts, SamplingParams, Submission
from serve_app.admission.backlog import MAX_WAIT_S, MIN_WAIT_S
from serve_app.admission.fleet_forecast import EngineForecast, FleetForecast
from serve_app.admission.gate import MOST_PREDICTED, Gate
from serve_app.errors.api_error import ApiError
from serve_app.metrics.ingress_recorder import IngressRecorder
from serve_app.routing.chooser import Chooser
from serve_app.settings.limits import GatePolicy, Limits
from serve_app.settings.routing import RoutingSettings
from tests.serve_app.harness import PROMPT, Answer, Exchange, ScriptedClient, app_for, finished, scheduled, tokens
from tests.support.reports import stats

pytestmark = pytest.mark.anyio
NOW = 1000.0
COSTS = PrefillCosts(token_s=0.001, pair_s=0.0)


def prompt(num_tokens: int) -> Submission:
    return Submission("r", tuple(range(num_tokens)), SamplingParams(max_tokens=1, seed=0))


def forecast(*queued_s: float, costs: PrefillCosts = COSTS, cached: Mapping[str, int] | None = None) -> FleetForecast:
    engines = tuple(EngineForecast(f"e{i}", NOW, one, costs) for i, one in enumerate(queued_s))
    return FleetForecast(engines, lambda _: cached or {})


def gate_of(known: FleetForecast | None, policy: GatePolicy | None = None, now: float = NOW) -> Gate:
    return Gate(policy or GatePolicy(), clock=lambda: now, forecast=lambda: known, wall_clock=lambda: now)


# --- what is predicted ------------------------------------------------------------------------------------------------


def test_the_fastest_engine_counts_whatever_waits_there() -> None:
    slow = EngineForecast("slow", NOW, 0.0, PrefillCosts(0.01, 0.0))
    busy = EngineForecast("busy", NOW, 2.0, COSTS)
    fleet = FleetForecast((slow, busy), lambda _: {})
    assert fleet.prompt_s(prompt(100), 0.0) == pytest.approx(0.1)
    assert fleet.wait_s(NOW) == 0


def test_a_queue_passes_by_itself_until_the_next_report() -> None:
    fleet = forecast(3.0, 2.0)
    assert [fleet.wait_s(now) for now in (NOW - 1, NOW, NOW + 1.5, NOW + 60)] == [2.0, 2.0, 0.5, 0.0]


def test_what_an_engine_has_cached_costs_nothing_and_is_looked_up_only_if_it_matters() -> None:
    asked = []

    def cached(submission: Submission) -> dict[str, int]:
        asked.append(submission)
        return {"e1": 900}

    fleet = FleetForecast(forecast(0.0, 0.2).engines, cached)
    assert fleet.prompt_s(prompt(1000), enough_s=1.0) == pytest.approx(1.0)
    assert asked == []
    assert fleet.prompt_s(prompt(1000), enough_s=0.5) == pytest.approx(0.1)
    assert fleet.prompt_s(prompt(900), enough_s=0.5) == pytest.approx(0.001), "the last token is computed"


def test_the_router_knows_what_is_cached_and_supposes_the_rest_of_a_prompt_whose_head_fills_its_look_up() -> None:
    chooser = Chooser(RoutingSettings(prefix_blocks=4), 10, Random(0))
    chooser.fleet.update({"a": stats(NOW, costs=COSTS), "b": stats(NOW, costs=COSTS)})
    chooser.fleet.open("r")
    (first, *_), *_ = chooser.place("r", prompt(100), ["a", "b"], NOW).ranks
    assert chooser.most_cached(prompt(35)) == {first: 30}
    assert chooser.most_cached(prompt(100)) == {first: 100}
    assert chooser.most_cached(prompt(5)) == {}


def test_a_fleet_says_nothing_while_one_engine_does_not_predict() -> None:
    fleet = Chooser(RoutingSettings(), 4, Random(0)).fleet
    assert fleet.forecasts() == ()
    fleet.update({"a": stats(NOW, queued_s=2.0, costs=COSTS)})
    assert fleet.forecasts() == (EngineForecast("a", NOW, 2.0, COSTS),)
    for other in ({}, stats(NOW, queued=3)):
        fleet.update({"a": stats(NOW, queued_s=2.0, costs=COSTS), "b": other})
        assert fleet.forecasts() == ()


# --- when to retry ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queued_s", "wait_s"), [((7.5, 4.2), 4.2), ((0.01, 5.0), MIN_WAIT_S), ((900.0, 800.0), MAX_WAIT_S)]
)
async def test_a_refusal_names_when_the_least_loaded_engine_has_room(
    queued_s: tuple[float, ...], wait_s: float
) -> None:
    gate = gate_of(forecast(*queued_s), GatePolicy(deployment=Limits(max_concurrent_requests=1)))
    with gate.enter(), pytest.raises(ApiError) as refused:
        gate.enter()
    assert refused.value.headers is not None
    assert float(refused.value.headers["retry-after-ms"]) == pytest.approx(1000 * wait_s, abs=1)
    assert gate.retry_after_s() == pytest.approx(wait_s)


@pytest.mark.parametrize("known", [None, forecast(0.0, 3.0)])
def test_without_predictions_or_a_queue_the_drain_rate_says_when(known: FleetForecast | None) -> None:
    """Where no prompt waits, seats are what is missing: prefill does not say when one becomes free."""
    assert gate_of(known).retry_after_s() == gate_of(None).retry_after_s()


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_a_deadline_is_refused_only_if_predictions_exceed_it_twice_over() -> None:
    gate = gate_of(forecast(0.0, 0.0))
    gate.check_deadline([prompt(5), prompt(1000)], 1.0 / SURELY_LATE + 0.01, 9.0)
    late = r"at once: its prompt takes about 1\.0 s, and of its deadline of 2 s 0\.490 s are left"
    with pytest.raises(EngineError, match=late) as no:
        gate.check_deadline([prompt(5), prompt(1000)], 1.0 / SURELY_LATE - 0.01, 2.0)
    assert no.value.code is ErrorCode.DEADLINE_EXCEEDED


def test_a_long_queue_refuses_no_deadline() -> None:
    """Regression: one tenant's backlog refused everybody's requests. Priorities, shares and short prompts go first, and
    streams that share the steps now may have ended by then: only an engine knows who waits for whom."""
    gate_of(forecast(500.0)).check_deadline([prompt(16)], 1.0, 1.0)


def test_many_prompts_are_not_all_looked_up() -> None:
    asked = []
    engines = forecast(0.0).engines
    gate = gate_of(FleetForecast(engines, lambda one: asked.append(one) or {"e0": 9_999}))
    gate.check_deadline([prompt(10_000)] * 128, 0.1, 0.1)
    assert len(asked) == MOST_PREDICTED


def test_a_cached_prompt_is_not_refused() -> None:
    gate_of(forecast(0.0, 9.0, cached={"e0": 9_999})).check_deadline([prompt(10_000)], 0.1, 0.1)


def test_without_reports_no_deadline_is_refused() -> None:
    gate_of(None).check_deadline([prompt(10_000)], 0.001, 0.001)


async def post(known: FleetForecast | None, client: ScriptedClient, **options: object) -> Answer:
    headers = [("content-type", "application/json"), ("Request-Timeout-Ms", "1000")]
    app = app_for(client, gate=gate_of(known), **options)
    return await Exchange(app, "POST", "/v1/completions", json.dumps(PROMPT).encode(), headers).finish()


async def test_a_hopeless_request_is_ended_before_it_waits_or_reaches_an_engine() -> None:
    client = ScriptedClient([scheduled()], tokens("a"), [finished()])
    recorder = IngressRecorder(gate_of(None))
    answer = await post(forecast(0.0, 0.0, costs=PrefillCosts(25.0, 0.0)), client, recorder=recorder)
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    assert "its prompt takes about 50.0 s, and its deadline is 1 s" in answer.error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert client.submissions == []
    outcome = ("chunkserve:requests", ("server_error",))
    errors = [one.value for one in recorder.samples() if (one.name, one.labels) == outcome]
    assert errors == [1], "as one that an engine has refused"


@pytest.mark.parametrize("known", [None, forecast(60.0, 50.0)])
async def test_a_request_that_some_engine_may_serve_in_time_goes_there(known: FleetForecast | None) -> None:
    client = ScriptedClient([scheduled()], tokens("a"), [finished()])
    assert (await post(known, client)).status == 200
    assert len(client.submissions) == 1
