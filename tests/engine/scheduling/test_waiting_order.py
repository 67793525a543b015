"""Contracts of the queue compared with its definition, in random lives, and of what its operations cost, counted.
The costs are comparisons and requests looked at: a clock would measure the machine."""

from __future__ import annotations

import random
from itertools import count, islice

import pytest

from engine.config import SchedulerConfig
from engine.protocol import SamplingParams, Submission
from engine.scheduling import tenant_shares as shares
from engine.scheduling.request import Request, create_request
from engine.scheduling.sorted_list import LOAD, SortedList
from engine.scheduling.tenant_shares import Shares
from engine.scheduling.waiting import Lane, WaitingQueue
from tests.support.engines import resolved_config
from tests.support.waiting_oracle import PlainQueue

MANY = 20_000


def request_of(arrival_index: int, *, tenant: str = "", priority: int = 0, tokens: int = 3) -> Request:
    params = SamplingParams(max_tokens=9)
    submission = Submission(str(arrival_index), (1,) * tokens, params, tenant=tenant, priority=priority)
    return create_request(submission, resolved_config(), arrival_index)


# --- the same order as by definition ---------------------------------------------------------------------------------


class Life:
    """Sends the same random events to a queue and to another one that works everything out anew."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.queue = WaitingQueue(SchedulerConfig(priority_age_ms=500))
        self.plain = PlainQueue(0.5, SchedulerConfig().answer_token_weight)
        self.running: list[Request] = []
        self.now, self._arrivals = 0.0, count()
        self.tenants = [f"t{i}" for i in range(self.draw.choice([1, 2, 9]))]
        self.priorities = list(range(self.draw.choice([1, 2, 4])))
        self.where = self.draw.choice(["arrival", "front", "back"])
        self.by_time = self.draw.random() < 0.4

    def arrive(self) -> None:
        tenant, priority = self.draw.choice(self.tenants), self.draw.choice(self.priorities)
        request = request_of(next(self._arrivals), tenant=tenant, priority=priority, tokens=self.draw.randint(1, 9))
        request.waiting_since = self.now
        if self.by_time:  # with targets, short prompts may go first
            request.place = round(1e6 * self.now) + self.draw.randint(0, 10**6), request.arrival_index
        request.expected_cached = self.draw.randint(0, len(request.token_ids) - 1)
        self.queue.enter(request)
        self.plain.enter(request)

    def admit(self) -> None:
        for request in list(islice(self.queue.in_order(self.now), self.draw.randint(0, 3))):
            self.remove(request)
            request.was_scheduled = True
            self.running.append(request)

    def abort(self) -> None:
        if self.plain.waiting:
            request = self.draw.choice(self.plain.waiting)
            self.remove(request)
            self.queue.leave(request)
            self.plain.leave(request)

    def finish(self) -> None:
        if self.running:
            request = self.running.pop(self.draw.randrange(len(self.running)))
            self.queue.leave(request)
            self.plain.leave(request)

    def preempt(self) -> None:
        if self.running:
            request = self.running.pop(self.draw.randrange(len(self.running)))
            request.waiting_since = self.now
            self.queue.put_back(request, self.where)
            self.plain.waiting.append(request)

    def serve(self) -> None:
        for request in self.running:
            tokens = self.draw.randint(0, 20)
            self.queue.serve(request, tokens + SchedulerConfig().answer_token_weight)
            self.plain.serve(request, tokens, 1)

    def remove(self, request: Request) -> None:
        assert self.queue.remove(request)
        self.plain.waiting.remove(request)

    def check(self) -> None:
        waiting = self.plain.waiting
        assert list(self.queue.in_order(self.now)) == self.plain.in_order(self.now)
        assert list(self.queue.in_order(self.now - 0.3)) == self.plain.in_order(self.now - 0.3), "an earlier look"
        assert self.queue.oldest_since() == self.plain.oldest_since()
        assert {request.request_id for request in self.queue} == {request.request_id for request in waiting}
        assert all(self.queue.find(request.request_id) is request for request in waiting)
        assert self.queue.num_tokens == sum(len(request.token_ids) for request in waiting)
        ends = [(request.expected_cached, len(request.token_ids)) for request in waiting]
        assert self.queue.num_new_tokens == sum(end - start for start, end in ends)
        assert self.queue.num_new_pairs == sum(sum(range(start + 1, end + 1)) for start, end in ends)
        assert self.queue.num_preempted == sum(request.was_scheduled for request in waiting)


@pytest.mark.parametrize("seed", range(60))
def test_the_order_is_that_of_a_queue_which_is_sorted_anew_each_time(seed: int) -> None:
    life = Life(seed)
    events = [life.arrive, life.arrive, life.arrive, life.admit, life.abort, life.finish, life.preempt, life.serve]
    for _ in range(120):
        life.draw.choice(events)()
        life.now += life.draw.choice([0.0, 0.01, 0.2])
        if life.draw.random() < 0.6:  # otherwise several events come between two looks
            life.check()


def test_whoever_waited_for_the_age_bound_goes_before_other_priorities_also_behind_a_place_by_time() -> None:
    """Regression: only the first request of a priority was asked since when it waits. With targets, short prompts that
    came later stood before it, so that the old one waited as long as there were urgent ones."""
    queue = WaitingQueue(SchedulerConfig(priority_age_ms=10_000))
    for number, (priority, since, place) in enumerate([(5, 0.0, 9), (5, 5.0, 8), (0, 9.0, 10)]):
        request = request_of(number, priority=priority)
        request.waiting_since, request.place = since, (place, number)
        queue.enter(request)
    assert queue.oldest_since() == 0.0
    assert [request.arrival_index for request in queue.in_order(9.9)] == [2, 1, 0]
    assert [request.arrival_index for request in queue.in_order(10.1)] == [1, 0, 2]
    assert [request.arrival_index for request in queue.in_order(9.9)] == [2, 1, 0], "an earlier look"


@pytest.mark.parametrize("where", ["front", "back"])
def test_a_preempted_request_waits_where_it_was_put_and_holds_up_nobody_who_arrives_later(where: str) -> None:
    queue = WaitingQueue(SchedulerConfig())
    requests = [request_of(arrival_index) for arrival_index in range(8)]
    for request in requests[:5]:
        queue.enter(request)
    for victim in requests[:3]:
        queue.remove(victim)
    for victim in requests[:3]:
        queue.put_back(victim, where)  # type: ignore[arg-type]
    for request in requests[5:]:
        queue.enter(request)
    order = {"front": [2, 1, 0, 3, 4, 5, 6, 7], "back": [3, 4, 0, 1, 2, 5, 6, 7]}
    assert [request.arrival_index for request in queue.in_order(0.0)] == order[where]


# --- what it costs ---------------------------------------------------------------------------------------------------


class Key(int):
    """Part of a queue position that counts how often it was compared."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        Key.compared += 1
        return int(self) < int(other)

    def __eq__(self, other: object) -> bool:
        Key.compared += 1
        return isinstance(other, int) and int(self) == int(other)

    __hash__ = int.__hash__


def long_queue(num_tenants: int = 1, requeue: str = "arrival") -> tuple[WaitingQueue, list[Request]]:
    """Make a queue in which MANY wait, and sixteen that were admitted from its front."""
    queue = WaitingQueue(SchedulerConfig())
    template = request_of(0)
    requests = []
    for arrival_index in range(MANY + 16):
        request = Request(
            request_id=str(arrival_index),
            arrival_index=arrival_index,
            token_ids=template.token_ids,
            prompt_len=3,
            max_tokens=9,
            sampling=template.sampling,
            row_sampling=template.row_sampling,
            stop_token_ids=template.stop_token_ids,
            answer_start=3,
            tenant=f"t{arrival_index % num_tenants}",
            place=(Key(arrival_index), 0),
        )
        queue.enter(request)
        requests.append(request)
    admitted = list(islice(queue.in_order(0.0), 16))
    for request in admitted:
        queue.remove(request)
        request.was_scheduled = True
    return queue, admitted


@pytest.mark.parametrize("num_tenants", [1, 10_000])
@pytest.mark.parametrize("where", ["arrival", "front", "back"])
def test_sixteen_preemptions_among_twenty_thousand_compare_as_often_as_a_search_does(
    where: str, num_tenants: int
) -> None:
    """Regression: each preemption sorted its whole lane again, or looked at the places of all that wait:
    590 ms among 100,000."""
    queue, admitted = long_queue(num_tenants)
    Key.compared = 0
    for victim in admitted:
        queue.put_back(victim, where)  # type: ignore[arg-type]
    order = list(islice(queue.in_order(0.0), 80))
    assert len(queue) == MANY + 16
    assert len(order) == 80
    assert Key.compared < (16 + 80) * 6 * 15, "some searches of log2(20,000) for each change and each request seen"


@pytest.mark.parametrize("num_tenants", [1, 10_000])
def test_an_abort_among_twenty_thousand_costs_a_search(num_tenants: int) -> None:
    queue, _ = long_queue(num_tenants)
    list(islice(queue.in_order(0.0), 1))
    Key.compared = 0
    for arrival_index in (19_999, 10_000, 17_123, 20):
        request = queue.find(str(arrival_index))
        assert request is not None
        assert queue.remove(request)
        queue.leave(request)
    assert queue.find("10000") is None
    assert Key.compared < 4 * 6 * 15
    list(islice(queue.in_order(0.0), 1))
    assert Key.compared < 8 * 6 * 15


@pytest.mark.parametrize("num_tenants", [1, 10_000])
def test_a_look_at_the_queue_sees_as_many_as_it_asks_for(num_tenants: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a plan copied every lane, and asked the first request of each tenant for its rank."""
    queue, _ = long_queue(num_tenants)
    list(islice(queue.in_order(0.0), 1))
    seen = 0
    real = SortedList.__iter__

    def counting(self: SortedList[tuple[object, ...]]) -> object:
        nonlocal seen
        for value in real(self):
            seen += 1
            yield value

    monkeypatch.setattr(SortedList, "__iter__", counting)
    assert len(list(islice(queue.in_order(0.01), 10))) == 10
    assert seen <= 60, "ten lanes, their first requests, and what comes next in each"
    assert queue.oldest_since() == 0.0
    assert seen <= 60


# --- what is remembered of tenants -----------------------------------------------------------------------------------


def test_tenants_that_are_served_in_each_step_are_not_all_ranked_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 500 tenants that run and wait, ranking all of them was two fifths of what a step costs the host."""
    num_ranked = 0
    place = WaitingQueue._place

    def spy(queue: WaitingQueue, lane: Lane, *, aged: bool) -> None:
        nonlocal num_ranked
        num_ranked += 1
        place(queue, lane, aged=aged)

    queue, draw = WaitingQueue(SchedulerConfig()), random.Random(1)
    requests = [request_of(number, tenant=f"t{number}") for number in range(500)]
    served = {request: float(draw.randrange(2000)) for request in requests}
    for request in requests:
        queue.enter(request)
    for request, amount in served.items():
        queue.serve(request, amount)
    list(queue.in_order(0.0))
    monkeypatch.setattr(WaitingQueue, "_place", spy)
    for _ in range(50):
        for request in draw.sample(requests, 400):
            queue.serve(request, 2.0)
            served[request] += 2.0
        seen = list(islice(queue.in_order(0.0), 3))
        assert seen == sorted(requests, key=lambda one: (served[one], one.place))[:3]
    assert num_ranked < 50 * 20


def test_a_tenant_that_has_gone_is_remembered_only_while_it_is_ahead_of_those_present() -> None:
    queue = WaitingQueue(SchedulerConfig())
    stays = request_of(0, tenant="stays")
    queue.enter(stays)
    ahead = request_of(1, tenant="ahead")
    queue.enter(ahead)
    queue.serve(ahead, 100)
    queue.remove(ahead)
    queue.leave(ahead)
    assert queue.num_tenants == 2, "if it came back now, it would stand behind the other"
    queue.serve(stays, 100)
    passing = request_of(2, tenant="passing")
    queue.enter(passing)
    queue.remove(passing)
    queue.leave(passing)
    assert queue.num_tenants == 1


def test_five_thousand_tenants_that_came_and_went_leave_nothing_while_another_stays() -> None:
    """Regression: their state was kept until the whole priority was idle, and every submission looked at all of it."""
    queue = WaitingQueue(SchedulerConfig())
    stays = request_of(0, tenant="stays")
    queue.enter(stays)
    most = 0
    for arrival_index in range(1, 5_001):
        request = request_of(arrival_index, tenant=f"t{arrival_index}")
        queue.enter(request)
        queue.serve(request, 100)
        queue.serve(stays, 2.0)
        queue.remove(request)
        queue.leave(request)
        most = max(most, queue.num_tenants)
    assert most < 100, "those of the last fifty steps, in which the one that stays had a hundred tokens"


def test_what_is_remembered_is_bounded_also_while_the_least_served_gets_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shares, "MAX_PAST", 20)
    counters = Shares()
    counters.enter((0, "stuck"))
    for number in range(1000):
        counters.enter((0, f"t{number}"))
        counters.serve((0, f"t{number}"), 1 + number % 500)
        counters.leave((0, f"t{number}"))
        assert len(counters) <= 22
    counters.enter((0, "t499"))
    assert counters.served((0, "t499")) == 500, "whoever is furthest ahead is remembered longest"


def test_a_submission_looks_at_no_more_tenants_than_have_been_served_since_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: a submission asked each tenant for its count: 1.1 ms among 50,000."""
    counters = Shares()
    for number in range(5_000):
        counters.enter((0, f"t{number}"))
    for number in range(30):
        counters.serve((0, f"t{number}"), 10)
    moves = 0
    real = SortedList.add

    def counting(self: SortedList[tuple[object, ...]], value: tuple[object, ...]) -> None:
        nonlocal moves
        moves += 1
        real(self, value)

    monkeypatch.setattr(SortedList, "add", counting)
    counters.enter((0, "new"))
    assert moves <= 31


# --- the sorted list -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_sorted_list_is_what_sorting_gives(seed: int) -> None:
    draw, values, ours = random.Random(seed), set(), SortedList[tuple[int]]()
    for _ in range(6 * LOAD):
        value = (draw.randrange(20 * LOAD),)
        if value not in values:
            values.add(value)
            ours.add(value)
        if values and draw.random() < 0.3:
            gone = draw.choice(sorted(values)[:: draw.choice([1, 40])])
            values.remove(gone)
            ours.remove(gone)
    assert list(ours) == sorted(values)
    assert len(ours) == len(values)
    assert (ours.first, ours.last) == (min(values), max(values))
    for value in sorted(values):
        ours.remove(value)
    assert not ours
    with pytest.raises(KeyError):
        ours.remove((1,))
