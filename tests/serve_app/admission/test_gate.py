"""Owns the contract of the gate: who is refused, who waits, who is next. Long: each limit, each way to leave.
Never waits for real time: clocks are turned by hand or virtual, and loops run until they are quiet."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pydantic import ValidationError

from engine.protocol import EngineError, ErrorCode, RequestRejected
from loadtest.sim.virtual_loop import VirtualLoop
from serve_app.admission.gate import AdmissionTicket, Gate
from serve_app.engines import liveness
from serve_app.errors.api_error import ApiError
from serve_app.settings.admission import AdmissionSettings
from serve_app.settings.application import AppSettings
from serve_app.settings.engine_names import ENGINE
from serve_app.settings.limits import UNLIMITED, GatePolicy, Limits, Tenant
from tests.serve_app.harness import (
    PROMPT,
    TIMEOUT_S,
    Answer,
    Exchange,
    ScriptedClient,
    app_for,
    post,
    scheduled,
    tokens,
)

pytestmark = pytest.mark.anyio
ANN, BOB = Tenant(name="ann"), Tenant(name="bob")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Guest:
    """A request at a gate: a task that does what it is told."""

    def __init__(self, gate: Gate, tenant: Tenant = ANN, num_tokens: int = 10) -> None:
        self.ticket: AdmissionTicket | None = None
        self.inside = False
        self.error: Exception | None = None
        self._may_go = asyncio.Event()
        self.task = asyncio.ensure_future(self._live(gate, tenant, num_tokens))

    async def _live(self, gate: Gate, tenant: Tenant, num_tokens: int) -> None:
        try:
            with gate.enter(tenant) as self.ticket:
                await self.ticket.dispatched(num_tokens)
                self.inside = True
                await self._may_go.wait()
                self.ticket.started()
        except (ApiError, EngineError) as error:
            self.error = error
        finally:
            self.inside = False

    def finish(self) -> None:
        self._may_go.set()


async def quiet() -> None:
    """Let every task go as far as it can."""
    for _ in range(8):
        await asyncio.sleep(0)


async def end(*guests: Guest) -> None:
    for guest in guests:
        guest.task.cancel()
    await asyncio.gather(*(guest.task for guest in guests), return_exceptions=True)


def at_most(capacity: int, **fields: Any) -> GatePolicy:
    return GatePolicy(dispatch_per_engine=capacity, **fields)


# --- waiting --------------------------------------------------------------------------------------------------------


async def test_a_freed_place_goes_to_exactly_the_next_one() -> None:
    gate = Gate(at_most(1))
    first, second, third = (Guest(gate) for _ in range(3))
    await quiet()
    assert (first.inside, second.inside, third.inside) == (True, False, False)
    first.finish()
    await quiet()
    assert (first.inside, second.inside, third.inside) == (False, True, False)
    await end(second, third)


async def test_an_answer_that_ends_passes_its_place_to_one_behind_it_of_the_same_request() -> None:
    gate = Gate(at_most(2))
    with gate.enter(ANN) as ticket:
        await ticket.dispatched(10, num_answers=5, num_at_once=2)
        other = Guest(gate, num_tokens=7)
        for num_ended, num_queued in enumerate([6, 4, 2, 0, 0], start=1):
            await quiet()
            assert other.inside is (num_ended > 4), "three of five had no place at first"
            ticket.started()
            assert gate.snapshot().num_queued_tokens == num_queued + 7, "and neither had their tokens"
            ticket.finished()
        await quiet()
        assert gate.snapshot().num_dispatched == 1
        other.finish()
        await other.task
    assert gate.snapshot().num_dispatched == 0


async def test_what_runs_on_an_engine_that_leaves_keeps_no_place_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a rollout, a new engine had nothing to do until the streams of the old one had ended."""
    monkeypatch.setattr(liveness, "_deployments", {})
    liveness.set_engines(frozenset("ab"))
    gate = Gate(at_most(1), lambda: len(liveness.engines()), num_leaving=liveness.num_leaving_calls)
    guests = [Guest(gate) for _ in range(5)]
    await quiet()
    for stream_id, engine in enumerate("ab"):
        liveness.open_call(stream_id)
        liveness.place_call(stream_id, engine)
    liveness.open_call(2)  # of a request that has no engine yet
    assert [guest.inside for guest in guests] == [True, True, False, False, False]
    liveness.set_engines(frozenset("b"))
    gate.refresh()
    await quiet()
    assert [guest.inside for guest in guests] == [True, True, False, False, False], "b has one"
    liveness.set_engines(frozenset("bc"))
    gate.refresh()
    await quiet()
    assert [guest.inside for guest in guests] == [True, True, True, False, False], "c has none"
    guests[0].finish()
    liveness.close_call(0)
    await quiet()
    assert [guest.inside for guest in guests] == [False, True, True, False, False], "a gets nothing more"
    await end(*guests)


def test_who_leaves_is_not_looked_for_while_nobody_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a full gate, each arrival and each refusal went through all open calls."""
    copies = 0

    class Placed(dict[int, str | None]):
        def copy(self) -> dict[int, str | None]:
            nonlocal copies
            copies += 1
            return super().copy()

    monkeypatch.setattr(liveness, "_deployments", {})
    monkeypatch.setattr(liveness._known(ENGINE), "placed", Placed())
    liveness.set_engines(frozenset("ab"))
    for stream_id in range(10):
        liveness.open_call(stream_id)
        liveness.place_call(stream_id, "ab"[stream_id % 2])
    assert [liveness.num_leaving_calls() for _ in range(100)] == [0] * 100
    assert copies == 0
    liveness.set_engines(frozenset("b"))
    assert liveness.num_leaving_calls() == 5
    for stream_id in range(0, 10, 2):
        liveness.close_call(stream_id)
    assert [liveness.num_leaving_calls() for _ in range(100)] == [0] * 100
    assert copies == 2
    liveness.open_call(10)
    liveness.place_call(10, "a")  # chosen just before it left
    assert liveness.num_leaving_calls() == 1


@pytest.mark.parametrize(("deployment", "refused"), [(UNLIMITED, False), (Limits(max_concurrent_requests=2), True)])
async def test_requests_on_an_engine_that_leaves_count_only_to_the_limit_of_the_config(
    deployment: Limits, refused: bool
) -> None:
    """A new engine's first requests were refused while the old one had streams."""
    policy = at_most(2, concurrent_per_engine=2, deployment=deployment)
    gate = Gate(policy, lambda: 1, num_leaving=lambda: 2)
    guests = [Guest(gate) for _ in range(2)]
    await quiet()
    assert gate.max_requests == (2 if refused else 4)
    if refused:
        with pytest.raises(ApiError):
            gate.enter()
    else:
        guests += [Guest(gate) for _ in range(2)]
        await quiet()
        with pytest.raises(ApiError):
            gate.enter()
    assert all(guest.inside for guest in guests)
    await end(*guests)


async def test_who_comes_later_does_not_overtake_while_a_freed_place_is_on_its_way_to_the_next() -> None:
    gate = Gate(at_most(1))
    first, second = Guest(gate), Guest(gate)
    await quiet()
    first.finish()
    third = Guest(gate)
    await quiet()
    assert (second.inside, third.inside) == (True, False)
    await end(second, third)


async def test_tenants_take_turns_however_many_one_of_them_sends() -> None:
    gate = Gate(at_most(1))
    anns = [Guest(gate, ANN) for _ in range(4)]
    await quiet()
    bobs = [Guest(gate, BOB) for _ in range(2)]
    await quiet()
    order = []
    for _ in range(6):
        (inside,) = [guest for guest in anns + bobs if guest.inside]
        order.append("a" if inside in anns else "b")
        inside.finish()
        await quiet()
    assert order == list("aababa")


async def test_a_place_that_is_given_to_one_who_is_just_leaving_goes_on_to_the_next() -> None:
    gate = Gate(at_most(1))
    first, second, third = (Guest(gate) for _ in range(3))
    await quiet()
    first.finish()
    await asyncio.sleep(0)  # first has left, and second was told, but has not run yet
    second.task.cancel()
    await quiet()
    assert third.inside
    await end(second, third)
    assert gate.snapshot().num_live == 0


async def test_one_who_leaves_before_a_place_is_free_is_not_given_it() -> None:
    gate = Gate(at_most(1))
    first, second, third = (Guest(gate) for _ in range(3))
    await quiet()
    second.task.cancel()  # It will learn so in the next turn of the loop, in which the place becomes free as well.
    first.finish()  # in which the place becomes free as well
    await quiet()
    assert third.inside
    await end(third)


async def test_capacity_that_comes_is_used_when_the_gate_is_told() -> None:
    engines = 0
    gate = Gate(at_most(1), lambda: engines)
    guests = [Guest(gate) for _ in range(3)]
    await quiet()
    assert [guest.inside for guest in guests] == [True, False, False], "no engine counts as one: it must be started"
    engines = 2
    gate.refresh()
    await quiet()
    assert [guest.inside for guest in guests] == [True, True, False]
    await end(*guests)


async def test_a_place_given_back_early_is_the_next_ones_and_is_given_back_once() -> None:
    gate = Gate(at_most(1))
    guests = [Guest(gate) for _ in range(3)]
    await quiet()
    assert guests[0].ticket is not None
    guests[0].ticket.finished()  # the engine has ended it; its reader is slow
    await quiet()
    assert [guest.inside for guest in guests] == [True, True, False]
    guests[0].finish()
    await quiet()
    assert gate.snapshot().num_dispatched == 1
    await end(*guests)


# --- limits ---------------------------------------------------------------------------------------------------------


def refusal(guest: Guest) -> tuple[int, str | None]:
    assert isinstance(guest.error, ApiError), guest.error
    return guest.error.status, guest.error.code


async def refused(gate: Gate, tenant: Tenant = ANN, num_tokens: int = 10) -> ApiError:
    guest = Guest(gate, tenant, num_tokens)
    await quiet()
    assert isinstance(guest.error, ApiError), guest.error
    return guest.error


async def test_beyond_the_deployments_requests_is_a_503_whoever_asks() -> None:
    gate = Gate(at_most(1, deployment=Limits(max_concurrent_requests=2)))
    guests = [Guest(gate, ANN), Guest(gate, BOB)]
    await quiet()
    for tenant in (ANN, BOB):
        error = await refused(gate, tenant)
        assert (error.status, error.type, error.code) == (503, "server_overloaded", "queue_full")
        assert error.message == (
            "The request queue is full: this ingress replica takes 2 requests at a time "
            "(admission.max_concurrent_requests)."
        )
    await end(*guests)
    again = Guest(gate)
    await quiet()
    assert again.inside
    await end(again)


async def test_beyond_a_tenants_own_requests_is_a_429_for_it_alone() -> None:
    gate = Gate(at_most(9, tenant=Limits(max_concurrent_requests=1)))
    ann = Guest(gate, ANN)
    await quiet()
    error = await refused(gate, ANN)
    assert (error.status, error.type, error.code) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert error.headers["x-ratelimit-limit-requests"] == "1"
    bob = Guest(gate, BOB)
    await quiet()
    assert bob.inside
    await end(ann, bob)


async def test_a_tenants_own_limits_go_before_those_of_every_tenant() -> None:
    gate = Gate(at_most(9, tenant=Limits(max_concurrent_requests=1, max_queued_tokens=10)))
    vip = Tenant(name="vip", limits=Limits(max_concurrent_requests=2))
    guests = [Guest(gate, vip, 5), Guest(gate, vip, 5)]
    await quiet()
    assert [guest.inside for guest in guests] == [True, True]
    assert (await refused(gate, vip)).headers["x-ratelimit-limit-requests"] == "2"
    await end(*guests)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"deployment": Limits(max_queued_tokens=100)}, (503, "queue_full")),
        ({"tenant": Limits(max_queued_tokens=100)}, (429, "rate_limit_exceeded")),
    ],
)
async def test_prompt_tokens_count_until_the_first_event(limits: Any, expected: tuple[int, str]) -> None:
    gate = Gate(at_most(1, **limits))
    first, second = Guest(gate, num_tokens=60), Guest(gate, num_tokens=40)
    await quiet()
    third = Guest(gate, num_tokens=1)
    await quiet()
    assert refusal(third) == expected
    assert first.ticket is not None
    first.ticket.started()
    first.ticket.started()
    assert gate.snapshot().num_queued_tokens == 40
    fourth = Guest(gate, num_tokens=60)
    await quiet()
    assert fourth.error is None
    await end(first, second, fourth)
    assert gate.snapshot().num_queued_tokens == 0


async def test_a_full_token_queue_is_refused_before_anybody_tokenizes() -> None:
    gate = Gate(at_most(1, deployment=Limits(max_queued_tokens=10)))
    first = Guest(gate, num_tokens=10)
    await quiet()
    with pytest.raises(ApiError):
        gate.enter(BOB)
    await end(first)


async def test_a_prompt_longer_than_the_token_limit_is_served_when_it_is_alone() -> None:
    gate = Gate(at_most(1, deployment=Limits(max_queued_tokens=10)))
    guest = Guest(gate, num_tokens=11)
    await quiet()
    assert guest.inside
    await end(guest)


async def test_a_refused_request_leaves_nothing_behind() -> None:
    gate = Gate(at_most(1, deployment=Limits(max_concurrent_requests=2, max_queued_tokens=10)))
    guests = [Guest(gate, num_tokens=6), Guest(gate, num_tokens=6), Guest(gate, num_tokens=6)]
    await quiet()
    assert [guest.error is None for guest in guests] == [True, False, False]
    snapshot = gate.snapshot()
    assert (snapshot.num_live, snapshot.num_waiting, snapshot.num_queued_tokens) == (1, 0, 6)
    await end(*guests)
    assert gate.snapshot().num_live == 0


def test_each_ingress_replica_keeps_its_share_of_a_limit_rounded_up() -> None:
    policy = GatePolicy(
        dispatch_per_engine=5,
        concurrent_per_engine=7,
        deployment=Limits(max_queued_tokens=100),
        tenant=Limits(max_concurrent_requests=1),
        ingress_replicas=3,
    )
    assert policy.capacity(2) == 4
    assert policy.of_deployment(2) == Limits(max_concurrent_requests=5, max_queued_tokens=34)
    assert policy.of_tenant(ANN).max_concurrent_requests == 1
    own = Tenant(limits=Limits(max_concurrent_requests=6, max_queued_tokens=10))
    assert policy.of_tenant(own) == Limits(max_concurrent_requests=2, max_queued_tokens=4)


async def test_without_a_limit_of_its_own_a_deployment_holds_what_its_engines_hold() -> None:
    engines = 1
    gate = Gate(at_most(1, concurrent_per_engine=1), lambda: engines)
    guest = Guest(gate)
    await quiet()
    assert (await refused(gate)).code == "queue_full"
    engines = 2
    second = Guest(gate)
    await quiet()
    assert second.inside
    await end(guest, second)


# --- estimates ------------------------------------------------------------------------------------------------------


async def test_retry_after_is_what_must_drain_over_the_measured_rate() -> None:
    clock = Clock()
    gate = Gate(at_most(2, deployment=Limits(max_concurrent_requests=5)), clock=clock)
    guests = [Guest(gate) for _ in range(5)]
    await quiet()
    for guest in guests[:2]:  # one in 3 s
        clock.now += 3
        guest.finish()
        await quiet()
    guests += [Guest(gate), Guest(gate)]
    await quiet()
    error = await refused(gate)
    assert (error.headers["Retry-After"], error.headers["retry-after-ms"]) == ("3", "3000")
    assert gate.retry_after_s() == pytest.approx(3)
    await end(*guests)


async def test_a_refused_prompt_is_told_when_its_tokens_will_have_room() -> None:
    clock = Clock()
    gate = Gate(at_most(9, tenant=Limits(max_queued_tokens=100)), clock=clock)
    guests = [Guest(gate, num_tokens=40), Guest(gate, num_tokens=40), Guest(gate, BOB, num_tokens=9000)]
    await quiet()
    clock.now += 4
    guests.pop().finish()  # the tokens of others are no measure of this tenant's
    await quiet()
    assert guests[0].ticket is not None
    guests[0].ticket.started()  # 40 tokens in 4 s
    error = await refused(gate, num_tokens=85)  # 25 too many
    assert (error.headers["Retry-After"], error.headers["retry-after-ms"]) == ("3", "2500")
    assert error.headers["x-ratelimit-remaining-tokens"] == "60"
    assert error.headers["x-ratelimit-reset-tokens"] == "2500ms"
    await end(*guests)


async def test_a_tenant_is_told_its_own_rate_and_not_that_of_the_others() -> None:
    clock = Clock()
    gate = Gate(at_most(9, tenant=Limits(max_concurrent_requests=2)), clock=clock)
    ann = [Guest(gate, ANN), Guest(gate, ANN)]
    await quiet()
    for _ in range(40):
        clock.now += 0.25
        bob = Guest(gate, BOB)
        await quiet()
        bob.finish()
        await quiet()
    ann[0].finish()
    ann += [Guest(gate, ANN)]
    await quiet()
    ann += [Guest(gate, ANN)]
    await quiet()
    assert (await refused(gate, ANN)).headers["Retry-After"] == "10"
    await end(*ann)


# --- draining -------------------------------------------------------------------------------------------------------


async def test_a_closed_gate_refuses_who_comes_and_keeps_who_is_inside() -> None:
    gate = Gate(at_most(1))
    first, second = Guest(gate), Guest(gate)
    await quiet()
    gate.close()
    late = Guest(gate)
    first.finish()
    await quiet()
    assert second.inside
    assert isinstance(late.error, RequestRejected)
    assert late.error.code is ErrorCode.DRAINING
    gate.reopen()
    welcome = Guest(gate)
    second.finish()
    await quiet()
    assert welcome.inside
    await end(welcome)


async def test_a_drain_waits_until_the_last_one_has_left() -> None:
    gate = Gate(at_most(1))
    guests = [Guest(gate), Guest(gate)]
    await quiet()
    drain = asyncio.ensure_future(gate.drain(TIMEOUT_S))
    guests[0].finish()
    await quiet()
    assert not drain.done()
    guests[1].finish()
    assert await asyncio.wait_for(drain, TIMEOUT_S) == 0


async def test_a_drain_whose_time_is_up_ends_who_waits_and_says_how_many_were_late() -> None:
    gate = Gate(at_most(1))
    guests = [Guest(gate) for _ in range(3)]
    await quiet()
    assert await gate.drain(0.01) == 3
    await quiet()
    assert [isinstance(guest.error, RequestRejected) for guest in guests] == [False, True, True]
    assert guests[0].inside, "it is with the engines, where the caller ends it"
    await end(*guests)
    assert gate.snapshot().num_live == 0


# --- over HTTP ------------------------------------------------------------------------------------------------------


def begin(app: Any, headers: Sequence[tuple[str, str]] = (), **fields: Any) -> Exchange:
    body = json.dumps(PROMPT | fields).encode()
    return Exchange(app, "POST", "/v1/completions", body, [("content-type", "application/json"), *headers])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0)


async def leave(*exchanges: Exchange) -> None:
    for exchange in exchanges:
        exchange.disconnect()
    await asyncio.wait_for(asyncio.gather(*(exchange.task for exchange in exchanges)), TIMEOUT_S)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_waits_at_the_gate_beyond_its_deadline_is_a_504(stream: bool) -> None:
    client, gate = ScriptedClient(asyncio.Event()), Gate(at_most(1))
    app = app_for(client, gate=gate)
    running = begin(app)
    await client.started.wait()
    answer = await begin(app, [("Request-Timeout-Ms", "30")], stream=stream).finish()
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"
    assert len(client.submissions) == 1
    assert gate.snapshot().num_waiting == 0
    await leave(running)


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"loop_factory": VirtualLoop})], ids=["virtual time"])
async def test_the_engine_gets_what_the_wait_has_left_of_the_deadline() -> None:
    client, gate = ScriptedClient(asyncio.Event()), Gate(at_most(1))
    app = app_for(client, gate=gate)
    first = begin(app)
    await client.started.wait()
    second = begin(app, timeout_ms=60_000)
    await until(lambda: gate.snapshot().num_waiting == 1)
    await asyncio.sleep(20)
    await leave(first)
    await until(lambda: len(client.submissions) == 2)
    left_s = client.submissions[1].timeout_s
    assert left_s == pytest.approx(60 - 20, abs=0.1)
    await leave(second)


async def test_a_client_that_leaves_while_it_waits_is_gone_at_once() -> None:
    client, gate = ScriptedClient(asyncio.Event()), Gate(at_most(1))
    app = app_for(client, gate=gate)
    running = begin(app)
    await client.started.wait()
    waiting = begin(app)
    await until(lambda: gate.snapshot().num_waiting == 1)
    await leave(waiting)
    assert waiting.silent
    snapshot = gate.snapshot()
    assert (snapshot.num_live, snapshot.num_waiting, snapshot.num_queued_tokens) == (1, 0, 2)
    await leave(running)
    assert len(client.submissions) == 1


async def test_a_refusal_comes_before_the_body_is_looked_at_and_says_when_to_come_back() -> None:
    client = ScriptedClient(asyncio.Event())
    app = app_for(client, gate=Gate(at_most(1, deployment=Limits(max_concurrent_requests=1))))
    running = begin(app)
    await client.started.wait()
    answer = await post(app, "/v1/completions", b"{ this is no JSON")
    assert (answer.status, answer.error["type"], answer.error["code"]) == (503, "server_overloaded", "queue_full")
    assert int(answer.headers["retry-after"]) >= int(answer.headers["retry-after-ms"]) / 1000
    await leave(running)


async def test_too_long_a_prompt_for_the_queue_is_refused_before_the_first_byte_of_a_stream() -> None:
    client = ScriptedClient(asyncio.Event())
    app = app_for(client, gate=Gate(at_most(1, deployment=Limits(max_queued_tokens=10))))
    running = begin(app)
    await client.started.wait()
    answer = await begin(app, prompt="nine more", stream=True).finish()
    assert (answer.status, answer.error["code"]) == (503, "queue_full")
    await leave(running)


@pytest.mark.parametrize("code", [ErrorCode.QUEUE_FULL, ErrorCode.DRAINING])
async def test_a_refusal_by_the_engine_carries_the_measured_rate_too(code: ErrorCode) -> None:
    clock = Clock()
    gate = Gate(clock=clock)
    guests = [Guest(gate), Guest(gate)]
    await quiet()
    clock.now += 7
    guests[0].finish()
    await quiet()
    answer = await complete_with(gate, ScriptedClient(RequestRejected(code, "The engine holds 2 requests.")))
    assert (answer.status, answer.headers["retry-after"], answer.headers["retry-after-ms"]) == (503, "7", "7000")
    if code is ErrorCode.QUEUE_FULL:
        assert answer.error["message"] == "The engine holds 2 requests."
    await end(*guests)


async def complete_with(gate: Gate, client: ScriptedClient) -> Answer:
    return await post(app_for(client, gate=gate), "/v1/completions", PROMPT)


async def test_a_stop_string_frees_the_place_before_a_slow_reader_has_read_the_end() -> None:
    client = ScriptedClient([scheduled()], tokens("a STOP"), asyncio.Event())
    gate = Gate(at_most(1))
    app = app_for(client, gate=gate)
    slow = begin(app, stop="STOP", stream=True)
    slow.may_send.clear()
    await until(lambda: client.started.is_set())
    other = begin(app)
    await until(lambda: gate.snapshot().num_waiting == 1)
    slow.may_send.set()
    await slow.next()
    await until(lambda: len(client.submissions) == 2)
    await leave(slow, other)


async def test_load_tells_the_gate_beside_the_engines() -> None:
    client, gate = ScriptedClient(asyncio.Event()), Gate(at_most(1))
    app = app_for(client, gate=gate)
    exchanges = [begin(app), begin(app)]
    await until(lambda: gate.snapshot().num_waiting == 1)
    answer = (await Exchange(app, "GET", "/load", headers=()).finish()).json
    assert len(answer["engines"]) == 1
    assert answer["ingress"] == {
        "draining": False,
        "num_live": 2,
        "num_waiting": 1,
        "num_dispatched": 1,
        "capacity": 1,
        "num_queued_tokens": 4,
        "requests_per_s": 0.0,
        "tokens_per_s": 0.0,
    }
    await leave(*exchanges)


# --- settings -------------------------------------------------------------------------------------------------------


def policy(**admission: int) -> GatePolicy:
    return AppSettings.model_validate({"admission": admission}).gate_policies[0]


def test_without_limits_of_its_own_a_deployment_holds_and_dispatches_what_its_engines_take() -> None:
    assert policy() == GatePolicy(dispatch_per_engine=64 + 16, concurrent_per_engine=64 + 1024)


_NO_COUNTS = ("dispatch_backlog", "tenant_min_priority")


@pytest.mark.parametrize("name", [name for name in AdmissionSettings.model_fields if name not in _NO_COUNTS])
def test_each_limit_is_the_one_it_says(name: str) -> None:
    limits = policy(**{name: 5})
    scope = limits.tenant if name.startswith("tenant_") else limits.deployment
    assert getattr(scope, name.removeprefix("tenant_")) == 5
    assert limits != policy()


def test_the_most_urgent_priority_is_limited_downwards_only() -> None:
    assert policy(tenant_min_priority=-7).tenant_min_priority == -7
    with pytest.raises(ValidationError, match="less than or equal to 0"):
        policy(tenant_min_priority=1)


def test_the_backlog_is_no_longer_than_an_engines_queue() -> None:
    assert policy(dispatch_backlog=3).dispatch_per_engine == 64 + 3
    settings = AppSettings.model_validate({"engine": {"max_num_seqs": 2, "max_queued_requests": 1}})
    assert settings.gate_policies[0].dispatch_per_engine == 3


def test_an_ingress_replica_is_handed_more_than_it_lets_in_so_that_it_can_refuse_the_rest() -> None:
    settings = AppSettings.model_validate({"engine_replicas": 3, "ingress_replicas": 2})
    assert settings.ingress_capacity == 2 * (3 * 1088 // 2)
    limited = AppSettings.model_validate({"admission": {"max_concurrent_requests": 7}})
    assert limited.ingress_capacity == 14


# --- random lives ---------------------------------------------------------------------------------------------------


class GateMachine(RuleBasedStateMachine):
    """Random arrivals, ends, cancellations and capacities, several of them between two turns of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.engines = 2
        self.gate = Gate(at_most(1, deployment=Limits(max_queued_tokens=200)), lambda: self.engines)
        self.guests: list[tuple[str, Guest]] = []
        self.entered: list[Guest] = []
        self.dispatched_before = 0

    def run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return self.loop.run_until_complete(work())

    @rule(tenant=st.sampled_from(["ann", "bob", "eve"]), num_tokens=st.integers(1, 40))
    def arrive(self, tenant: str, num_tokens: int) -> None:
        async def come() -> None:
            self.guests.append((tenant, Guest(self.gate, Tenant(name=tenant), num_tokens)))

        self.run(come)

    @precondition(lambda self: self.guests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.pick(data).task.cancel()

    @precondition(lambda self: self.guests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.pick(data).finish()

    @precondition(lambda self: self.guests)
    @rule(data=st.data(), kind=st.sampled_from(["started", "finished"]))
    def progress(self, data: st.DataObject, kind: str) -> None:
        guest = self.pick(data)
        if guest.inside and guest.ticket is not None:
            self.run_sync(guest.ticket.started if kind == "started" else guest.ticket.finished)

    @rule(engines=st.integers(0, 4))
    def scale(self, engines: int) -> None:
        self.engines = engines
        self.run_sync(self.gate.refresh)

    @rule()
    def settle(self) -> None:
        self.run(quiet)
        snapshot = self.gate.snapshot()
        assert snapshot.capacity is not None
        assert not snapshot.num_waiting or snapshot.num_dispatched >= snapshot.capacity, "somebody waits beside a place"
        live = [guest for _, guest in self.guests if not guest.task.done()]
        assert snapshot.num_live == len(live), "whoever waits still lives, and the other way round"
        for tenant in ("ann", "bob", "eve"):
            states = [guest.inside for name, guest in self.guests if name == tenant and not guest.task.done()]
            assert states == sorted(states, reverse=True), "within a tenant, the first to come is the first to go in"
        self.guests = [(name, guest) for name, guest in self.guests if not guest.task.done()]

    @invariant()
    def places_are_never_given_beyond_capacity(self) -> None:
        snapshot = self.gate.snapshot()
        assert snapshot.capacity is not None
        assert snapshot.num_dispatched <= max(snapshot.capacity, self.dispatched_before)
        self.dispatched_before = snapshot.num_dispatched

    def pick(self, data: st.DataObject) -> Guest:
        return data.draw(st.sampled_from([guest for _, guest in self.guests]))

    def run_sync(self, work: Callable[[], None]) -> None:
        async def call() -> None:
            work()

        self.run(call)

    def teardown(self) -> None:
        async def leave() -> None:
            await end(*(guest for _, guest in self.guests))

        self.run(leave)
        snapshot = self.gate.snapshot()
        assert (snapshot.num_live, snapshot.num_waiting, snapshot.num_dispatched) == (0, 0, 0)
        assert snapshot.num_queued_tokens == 0
        for account in self.gate._accounts.values():
            assert (account.requests.amount, account.tokens.amount) == (0, 0)
        assert not self.gate._queues
        self.loop.close()


TestGateMachine = GateMachine.TestCase
TestGateMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
