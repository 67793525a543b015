"""Owns the contract of the room that several models' gates share: whoever floods the server, no model is starved.
Never uses an engine."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import RequestRejected
from serve_app.admission.gate import Gate
from serve_app.admission.room import Room
from serve_app.errors.api_error import ApiError
from serve_app.settings.limits import GatePolicy, Limits, RoomPolicy, Tenant

pytestmark = pytest.mark.anyio


def gates(limit: int, *shares: float, tenant: Limits | None = None, **limits: int) -> list[Gate]:
    """Return the gates of as many models as there are shares."""
    room = Room(RoomPolicy(limits=Limits(max_concurrent_requests=limit, **limits), shares=shares))
    policy = GatePolicy(dispatch_per_engine=1, tenant=tenant or Limits())
    return [Gate(policy, room=room) for _ in shares]


class Crowd:
    """Enters gates, and leaves them."""

    def __init__(self, *models: Gate) -> None:
        self.models = models
        self.inside: list[list[ExitStack]] = [[] for _ in models]
        self.refusals: set[tuple[int, str | None, bool]] = set()

    def enter(self, model: int, tenant: str = "") -> bool:
        try:
            ticket = self.models[model].enter(Tenant(name=tenant))
        except ApiError as error:
            self.refusals.add((error.status, error.code, "Retry-After" in error.headers))
            return False
        stack = ExitStack()
        stack.enter_context(ticket)
        self.inside[model].append(stack)
        return True

    def leave(self, model: int) -> None:
        if self.inside[model]:
            self.inside[model].pop().close()

    def counts(self) -> list[int]:
        return [len(inside) for inside in self.inside]


async def test_a_flood_for_one_model_leaves_the_others_their_reserved_part() -> None:
    crowd = Crowd(*gates(12, 1, 2))
    flood = [crowd.enter(0) for _ in range(20)]
    assert flood == [True] * 8 + [False] * 12  # 12 without the 4 that are reserved for the other
    assert crowd.refusals == {(503, "queue_full", True)}
    assert [crowd.enter(1) for _ in range(5)] == [True] * 4 + [False]


async def test_what_nobody_has_reserved_is_for_whoever_comes_first() -> None:
    crowd = Crowd(*gates(12, 1, 2))
    assert [crowd.enter(1) for _ in range(11)] == [True] * 10 + [False]


async def test_a_reserved_part_that_is_used_is_not_reserved_twice() -> None:
    crowd = Crowd(*gates(8, 1, 1))
    assert all(crowd.enter(1) for _ in range(2))
    assert [crowd.enter(0) for _ in range(7)] == [True] * 6 + [False]
    crowd.leave(1)
    assert not crowd.enter(0)
    assert crowd.enter(1)


async def test_the_only_request_of_a_model_is_let_in_whatever_the_others_have() -> None:
    crowd = Crowd(*gates(1, 1, 1))
    assert crowd.enter(0)
    assert crowd.enter(1)
    assert not crowd.enter(0)


@settings(max_examples=200, deadline=None)
@given(
    limit=st.integers(1, 24),
    shares=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=4),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=80),
)
def test_no_order_of_arrivals_starves_a_model_or_exceeds_the_limit_by_more_than_lone_requests(
    limit: int, shares: list[float], moves: list[tuple[bool, int]]
) -> None:
    async def run() -> None:
        crowd = Crowd(*gates(limit, *shares))
        reserved = [int(limit / 2 * share / sum(shares)) for share in shares]
        for enters, number in moves:
            model = number % len(shares)
            before = crowd.counts()
            if not enters:
                crowd.leave(model)
            elif not crowd.enter(model):
                assert before[model] >= max(1, reserved[model])
                assert sum(map(max, before, reserved)) >= limit
            elif before[model] + 1 > max(1, reserved[model]):
                assert sum(map(max, crowd.counts(), reserved)) <= limit
            assert sum(crowd.counts()) <= limit + len(shares)
        for inside in crowd.inside:
            for stack in inside:
                stack.close()

    anyio.run(run)


async def test_queued_tokens_are_shared_by_the_same_rule() -> None:
    first, second = gates(100, 1, 1, max_queued_tokens=40)
    waits: list[asyncio.Task[None]] = []
    with ExitStack() as inside:

        async def wait(gate: Gate) -> None:
            ticket = inside.enter_context(gate.enter())
            waits.append(asyncio.ensure_future(ticket.dispatched(10)))
            await asyncio.sleep(0)
            if waits[-1].done():
                await waits[-1]

        for _ in range(3):
            await wait(first)
        with pytest.raises(ApiError, match="40 queued prompt tokens"):
            await wait(first)
        await wait(second)
        with pytest.raises(ApiError, match="40 queued prompt tokens"):
            await wait(second)
        assert (first.snapshot().num_queued_tokens, second.snapshot().num_queued_tokens) == (30, 10)
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def test_a_tenants_limit_counts_its_requests_for_all_models() -> None:
    crowd = Crowd(*gates(100, 1, 1, tenant=Limits(max_concurrent_requests=2)))
    assert crowd.enter(0, "ann")
    assert crowd.enter(1, "ann")
    assert not crowd.enter(0, "ann")
    assert crowd.enter(0, "bob")
    assert crowd.refusals == {(429, "rate_limit_exceeded", True)}


async def test_a_drained_gate_refuses_while_another_models_is_open() -> None:
    first, second = gates(10, 1, 1)
    first.close()
    with pytest.raises(RequestRejected):
        first.enter()
    with second.enter():
        pass
