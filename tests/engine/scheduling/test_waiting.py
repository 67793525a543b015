"""Contracts of the queue: age, priority, fair shares between tenants, arrival. Long: each rule against each other.
The clock is turned by hand, so that every bound is counted in steps."""

from __future__ import annotations

from itertools import count, pairwise
from typing import Literal

import pytest

from engine.config import SchedulerConfig
from engine.protocol import SamplingParams, Submission
from engine.scheduling.planner import MAX_PASSED
from engine.scheduling.request import Request, create_request
from engine.scheduling.reservation import Admission
from engine.scheduling.service import CountedTokens
from engine.scheduling.waiting import WaitingQueue
from engine.step import RowKind
from tests.support.engines import RecordingCore, answer_alone, resolved_config


class Queue:
    """A queue that is filled by hand."""

    def __init__(self, **settings: object) -> None:
        self.entries = WaitingQueue(SchedulerConfig(**settings))
        self._arrivals = count()

    def enter(self, name: str, *, priority: int = 0, tenant: str = "", since: float = 0.0, tokens: int = 4) -> Request:
        submission = Submission(name, (1,) * tokens, SamplingParams(max_tokens=1), priority=priority, tenant=tenant)
        request = create_request(submission, resolved_config(), next(self._arrivals))
        request.waiting_since = since
        self.entries.enter(request)
        return request

    def end(self, request: Request) -> None:
        self.entries.remove(request)
        self.entries.leave(request)

    def names(self, now: float = 0.0) -> list[str]:
        return [request.request_id for request in self.entries.in_order(now)]


def one_seat(**settings: object) -> RecordingCore:
    """Make a core that computes one request at a time, so that the order of service is the order of the queue."""
    return RecordingCore(max_num_seqs=1, enable_prefix_caching=False, scheduler=SchedulerConfig(**settings))


def served(core: RecordingCore) -> list[str]:
    """Return the requests in the order of their first chunks."""
    return list(dict.fromkeys(row.request_id for plan in core.plans for row in plan.rows))


# --- priority, arrival, age ------------------------------------------------------------------------------------------


def test_a_lower_number_is_served_first_and_arrival_decides_inside_a_priority() -> None:
    core = one_seat()
    for name, priority in (("b0", 1), ("b1", 1), ("c0", 2), ("a0", -1), ("b2", 1), ("a1", -1)):
        core.send(name, [1, 2], priority=priority, max_tokens=1)
    core.run()
    assert served(core) == ["a0", "a1", "b0", "b1", "b2", "c0"]


def test_requests_that_waited_for_the_age_bound_go_before_all_others_in_order_of_arrival() -> None:
    queue = Queue(priority_age_ms=100)
    queue.enter("old and unimportant", priority=9, since=0.0)
    queue.enter("old and urgent", priority=0, since=0.02)
    queue.enter("young and urgent", priority=-5, since=0.09)
    assert queue.names(now=0.099) == ["young and urgent", "old and urgent", "old and unimportant"]
    assert queue.names(now=0.1) == ["old and unimportant", "young and urgent", "old and urgent"]
    assert queue.names(now=0.13) == ["old and unimportant", "old and urgent", "young and urgent"]


def test_a_request_behind_one_that_was_just_preempted_ages_all_the_same() -> None:
    queue = Queue(priority_age_ms=500)
    queue.enter("preempted", since=1.0).was_scheduled = True
    queue.enter("aged", since=0.0)
    queue.enter("urgent", priority=-1, since=1.0)
    assert queue.names(now=1.1) == ["preempted", "aged", "urgent"]
    assert queue.entries.oldest_since() == 0.0


@pytest.mark.parametrize("seats", [1, 4])
def test_an_endless_stream_of_urgent_requests_delays_another_by_its_age_bound_and_no_longer(seats: int) -> None:
    """Related to S5-R13: strict priorities starve whoever is not urgent."""
    core = RecordingCore(
        tick_ms=10,
        max_num_seqs=seats,
        max_num_batched_tokens=16,
        max_prefill_tokens=8,
        enable_prefix_caching=False,
        scheduler=SchedulerConfig(priority_age_ms=500),
    )
    for i in range(20):
        core.send(f"backlog{i}", [2] * 8, priority=0, max_tokens=1)
    core.send("low", [1] * 8, priority=7, max_tokens=1)
    for i in range(300):
        core.send(f"urgent{i}", [i % 31 + 1] * 8, priority=0, max_tokens=1)
        core.keep(core.step())
    steps = [i for i, plan in enumerate(core.plans) if any(row.request_id == "low" for row in plan.rows)]
    assert 30 <= steps[0] <= 50 + 20, "within its age, and those of the backlog that are older"


def test_looking_at_the_queue_changes_nothing() -> None:
    queue = Queue()
    for i in range(9):
        queue.enter(f"r{i}", tenant="xyz"[i * i % 3], priority=i % 2, tokens=1 + i)
    order = queue.names()
    assert queue.names() == order
    half_way = queue.entries.in_order(0.0)
    next(half_way), next(half_way)
    assert queue.names() == order
    assert sorted(order) == [f"r{i}" for i in range(9)]


def test_the_queue_counts_the_requests_and_the_tokens_that_wait() -> None:
    queue = Queue()
    a = queue.enter("a", tokens=5)
    b = queue.enter("b", tenant="other", tokens=7)
    assert (len(queue.entries), queue.entries.num_tokens, queue.entries.find("b")) == (2, 12, b)
    assert queue.entries.remove(a)
    assert not queue.entries.remove(a), "it runs, and waits no more"
    assert (len(queue.entries), queue.entries.num_tokens, queue.entries.find("a")) == (1, 7, None)


@pytest.mark.parametrize(
    ("where", "order"),
    [
        ("arrival", ["first", "second", "third"]),
        ("front", ["first", "second", "third"]),
        ("back", ["third", "second", "first"]),
    ],
)
def test_a_preempted_request_returns_to_its_place(where: Literal["arrival", "front", "back"], order: list[str]) -> None:
    """The request that began last is the first to give up its memory."""
    queue = Queue()
    first, second, _ = (queue.enter(name) for name in ("first", "second", "third"))
    for request in (first, second):
        queue.entries.remove(request)
    for request in (second, first):
        queue.entries.put_back(request, where)
    assert queue.names() == order


def test_whoever_is_put_back_in_front_goes_before_all_that_came_earlier() -> None:
    queue = Queue()
    _, second = queue.enter("first"), queue.enter("second")
    queue.entries.remove(second)
    queue.entries.put_back(second, "front")
    assert queue.names() == ["second", "first"]


# --- shares ----------------------------------------------------------------------------------------------------------


def test_two_tenants_of_a_priority_alternate_although_one_queued_fifty_requests_first() -> None:
    core = one_seat()
    for i in range(50):
        core.send(f"greedy{i}", [1] * 4, tenant="greedy", max_tokens=2, ignore_eos=True)
    for i in range(5):
        core.send(f"polite{i}", [2] * 4, tenant="polite", max_tokens=2, ignore_eos=True)
    core.run()
    assert served(core)[:10] == [name for i in range(5) for name in (f"greedy{i}", f"polite{i}")]


def test_tenants_alternate_within_one_step_too() -> None:
    """A turn has to count before the next one in the same plan, or a step of eight seats would go to one tenant."""
    core = RecordingCore(max_num_seqs=4, scheduler=SchedulerConfig(reserve_mode="prompt"))
    for tenant in ("a", "b"):
        for i in range(6):
            core.send(f"{tenant}{i}", [1] * 4, tenant=tenant, max_tokens=4, ignore_eos=True)
    core.keep(core.step())
    assert [row.request_id for row in core.plans[0].rows] == ["a0", "b0", "a1", "b1"]


def test_shares_are_counted_in_tokens_and_not_in_requests() -> None:
    core = one_seat()
    for i in range(12):
        core.send(f"long{i}", [1] * 30, tenant="long", max_tokens=1)
        core.send(f"short{i}", [2] * 6, tenant="short", max_tokens=1)
    core.run()
    order = served(core)
    assert order.index("long2") == 2 + 8, "32 and 8 tokens a request: four short ones for each long one"
    for tenant in ("long", "short"):
        own = [name for name in order if name.startswith(tenant)]
        assert own == [f"{tenant}{i}" for i in range(12)], "a tenant's own requests keep their order"


def test_a_share_is_of_one_priority_and_is_no_excuse_to_overtake_another() -> None:
    core = one_seat()
    for i in range(4):
        core.send(f"urgent{i}", [1] * 8, tenant="served most", priority=0, max_tokens=4, ignore_eos=True)
    core.send("low", [2] * 4, tenant="served least", priority=1, max_tokens=1)
    core.run()
    assert served(core)[-1] == "low"


def test_a_tenant_that_returns_is_not_owed_what_others_were_served_meanwhile() -> None:
    queue = Queue()
    busy = queue.enter("busy0", tenant="busy")
    queue.end(queue.enter("away", tenant="idle"))
    queue.entries.serve(busy, 1000)
    for i in range(1, 4):
        queue.enter(f"busy{i}", tenant="busy")
        queue.enter(f"idle{i}", tenant="idle")
    assert queue.names() == ["busy0", "idle1", "busy1", "idle2", "busy2", "idle3", "busy3"]


def test_a_tenant_that_stays_keeps_what_it_has_used_also_when_it_was_away_for_a_moment() -> None:
    queue = Queue()
    heavy, light = queue.enter("heavy0", tenant="heavy"), queue.enter("light0", tenant="light")
    queue.entries.serve(heavy, 1000)
    queue.end(heavy)
    queue.enter("heavy1", tenant="heavy")
    queue.enter("light1", tenant="light")
    assert queue.names() == ["light0", "light1", "heavy1"]
    queue.entries.remove(light)  # it runs, so that its tenant is still there
    queue.enter("third", tenant="new")
    assert queue.names() == ["light1", "third", "heavy1"], "a new tenant starts where the least served one is"


@pytest.mark.parametrize(("weight", "first"), [(1.0, "talks"), (2.0, "reads")])
def test_an_answer_token_counts_as_much_as_the_setting_says(weight: float, first: str) -> None:
    queue, service = Queue(), CountedTokens(weight)
    talks, reads = queue.enter("talks", tenant="talks"), queue.enter("reads", tenant="reads")
    queue.entries.serve(talks, service.answer(7, 10, decoded=True))
    queue.entries.serve(reads, service.prompt(2, 7))
    assert queue.names()[0] == first


def test_what_a_tenant_is_served_comes_from_its_prompts_and_from_its_answers() -> None:
    """Nine answer tokens weigh 18, so that three requests of 8 tokens go before
    the next request of the tenant that answered."""
    core = one_seat()
    for i in range(3):
        core.send(f"talk{i}", [1] * 6, tenant="talk", max_tokens=9, ignore_eos=True)
    for i in range(8):
        core.send(f"read{i}", [2] * 6, tenant="read", max_tokens=1)
    core.run()
    order = served(core)
    assert order == [
        *("talk0", "read0", "read1", "read2"),
        *("talk1", "read3", "read4", "read5"),
        *("talk2", "read6", "read7"),
    ]


def test_drafts_that_were_accepted_count_as_answer_tokens() -> None:
    """Regression: one count per row made a tenant's share depend on how well its answers were guessed."""
    orders = []
    for num_drafts in (0, 3):
        core = RecordingCore(
            max_num_seqs=1,
            num_speculative_tokens=num_drafts,
            enable_prefix_caching=False,
            scheduler=SchedulerConfig(),
        )
        for i in range(3):
            core.send(f"talk{i}", [1] * 6, tenant="talk", max_tokens=20, ignore_eos=True)
        for i in range(14):
            core.send(f"read{i}", [2] * 6, tenant="read", max_tokens=1)
        core.run()
        orders.append(served(core))
    assert orders[0] == orders[1]


def test_once_a_priority_is_idle_its_tenants_start_over() -> None:
    queue = Queue()
    heavy, light = queue.enter("heavy", tenant="heavy"), queue.enter("light", tenant="light")
    assert queue.entries.shares
    queue.entries.serve(heavy, 1000)
    queue.end(heavy)
    queue.end(light)
    assert not queue.entries.shares, "nothing is kept of tenants that are gone"
    queue.enter("heavy", tenant="heavy")
    queue.enter("light", tenant="light")
    assert queue.names() == ["heavy", "light"]


def test_another_priority_that_is_busy_keeps_its_own_counts_when_one_ends() -> None:
    queue = Queue()
    other = queue.enter("other", priority=1)
    heavy, light = queue.enter("heavy", tenant="heavy"), queue.enter("light", tenant="light")
    queue.entries.serve(heavy, 1000)
    queue.end(other)
    assert queue.names() == ["light", "heavy"]
    queue.end(light)


def test_many_tenants_are_served_in_turn_and_in_the_same_order_every_time() -> None:
    def order() -> list[str]:
        core = RecordingCore(max_num_seqs=3, scheduler=SchedulerConfig())
        for i in range(60):
            core.send(f"t{i % 20} {i // 20}", [1] * 4, tenant=f"t{i * 7 % 20}", max_tokens=2, ignore_eos=True)
        core.run()
        return served(core)

    first = order()
    assert first == order()
    tenants = [f"t{int(name.split()[0][1:]) * 7 % 20}" for name in first]
    assert all(len(set(tenants[i : i + 20])) == 20 for i in (0, 20, 40)), "each tenant once in every round"


# --- begun prompts and victims ---------------------------------------------------------------------------------------


def begun_and_urgent(**settings: object) -> RecordingCore:
    return RecordingCore(
        tick_ms=10,
        num_kv_blocks=200,
        max_num_batched_tokens=24,
        max_prefill_tokens=16,
        enable_prefix_caching=False,
        scheduler=SchedulerConfig(**settings),
    )


def test_an_urgent_prompt_goes_before_a_long_one_that_has_begun_and_leaves_it_the_rest_of_the_step() -> None:
    core = begun_and_urgent()
    core.send("long", [1] * 64, priority=1, max_tokens=1)
    core.keep(core.step())
    core.send("peer", [2] * 4, priority=1, max_tokens=1)
    core.send("urgent", [3] * 8, priority=0, max_tokens=1)
    core.keep(core.step())
    assert [(row.request_id, len(row.token_ids)) for row in core.plans[1].rows] == [("urgent", 8), ("long", 8)]
    core.run()
    assert served(core) == ["long", "urgent", "peer"]


def test_a_begun_prompt_that_stood_still_for_the_age_bound_goes_before_the_urgent_ones() -> None:
    core = begun_and_urgent(priority_age_ms=50)
    core.send("long", [1] * 64, priority=1, max_tokens=1)
    core.keep(core.step())
    for i in range(40):
        core.send(f"urgent{i}", [i % 31 + 1] * 16, priority=0, max_tokens=1)
        core.keep(core.step())
    steps = [i for i, plan in enumerate(core.plans) if any(row.request_id == "long" for row in plan.rows)]
    gaps = [b - a for a, b in pairwise(steps)]
    assert len(gaps) == 3
    assert set(gaps) <= {5, 6}, "50 ms of 10 ms steps"
    assert core.tokens("long") == answer_alone([1] * 64, max_tokens=1)


def test_a_begun_prompt_gets_on_within_the_age_bound_also_while_urgent_ones_are_under_way() -> None:
    core = begun_and_urgent(priority_age_ms=50)
    core.send("long", [1] * 64, priority=1, max_tokens=1)
    core.keep(core.step())
    for i in range(3):
        core.send(f"urgent{i}", [i + 2] * 160, priority=0, max_tokens=1)
    core.run()
    steps = [i for i, plan in enumerate(core.plans) if any(row.request_id == "long" for row in plan.rows)]
    gaps = [b - a for a, b in pairwise(steps)]
    assert len(gaps) == 3
    assert set(gaps) <= {5, 6}


def test_the_number_of_partial_prompts_is_bounded_for_each_priority_on_its_own() -> None:
    """A long prompt of low priority must not hold the only place that a long urgent one could begin in."""
    core = begun_and_urgent()
    for name, priority in (("low", 1), ("urgent", 0), ("urgent too", 0)):
        core.send(name, [priority + 1] * 40, priority=priority, max_tokens=1)
        core.keep(core.step())
    core.run()
    partial = [[row.request_id for row in plan.rows if row.kind is RowKind.MIDDLE] for plan in core.plans]
    assert partial[0] == ["low"]
    assert partial[1] == ["urgent"]
    assert not any({"urgent", "urgent too"} <= set(names) for names in partial)
    lasts = [row.request_id for plan in core.plans for row in plan.rows if row.kind is RowKind.LAST]
    assert lasts == ["urgent", "urgent too", "low"]


def test_prompts_of_two_priorities_are_partly_computed_side_by_side() -> None:
    core = begun_and_urgent(long_prefill_token_threshold=8)
    core.send("urgent", [1] * 40, priority=0, max_tokens=1)
    core.send("low", [2] * 40, priority=1, max_tokens=1)
    core.keep(core.step())
    assert [row.request_id for row in core.plans[0].rows] == ["urgent", "low"]


@pytest.mark.parametrize("how", ["lifo", "retract"])
def test_whoever_is_least_urgent_gives_up_memory_first(how: str) -> None:
    core = RecordingCore(
        num_kv_blocks=14,
        max_num_batched_tokens=64,
        max_prefill_tokens=64,
        enable_prefix_caching=False,
        scheduler=SchedulerConfig(reserve_mode="prompt", watermark_blocks=0, preempt_policy=how),
    )
    core.send("elder", [1] * 4, priority=9, max_tokens=30, ignore_eos=True)
    core.send("less urgent", [2] * 4, priority=5, max_tokens=30, ignore_eos=True)
    for _ in range(3):
        core.keep(core.step())
    for name in ("urgent", "latest"):  # by either policy alone, one of these would be taken
        core.send(name, [3] * 8, priority=0, max_tokens=30, ignore_eos=True)
    while not core.load().num_preemptions:
        core.keep(core.step())
    assert core.waiting == ["less urgent"]


# --- bypass ----------------------------------------------------------------------------------------------------------


def full_core(**settings: object) -> RecordingCore:
    """Make a core with a begun prompt of priority 1 in which the remaining memory fits exactly 12 tokens."""
    core = RecordingCore(
        block_size=4,
        num_kv_blocks=24,
        max_num_seqs=64,
        max_num_batched_tokens=96,
        max_prefill_tokens=32,
        enable_prefix_caching=False,
        scheduler=SchedulerConfig(
            reserve_mode="prompt",
            watermark_blocks=0,
            long_prefill_token_threshold=4,
            **{"admission_order": "bypass", **settings},
        ),
    )
    core.send("begun", [1] * 84, priority=1, max_tokens=1)
    core.keep(core.step())
    return core


def test_a_step_tests_no_more_misfits_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Testing 2,000 waiting requests took 4.6 ms of every step. Urgent requests are looked at twice: before the prompts
    that have begun and after them."""
    core = full_core()
    for i in range(3 * MAX_PASSED):
        core.send(f"large{i}", [2] * 80, priority=0, max_tokens=1)
    core.send("small", [3] * 4, priority=0, max_tokens=1)
    misfits = 0
    real_fits = Admission.fits

    def counting_fits(self: Admission, request: Request, shared_blocks: int, *, alone: bool) -> bool:
        nonlocal misfits
        fits = real_fits(self, request, shared_blocks, alone=alone)
        misfits += not fits
        return fits

    monkeypatch.setattr(Admission, "fits", counting_fits)
    core.keep(core.step())
    assert misfits == MAX_PASSED
    assert "small" in core.waiting, "it stands behind more of them than are looked past"


def test_no_request_is_overtaken_more_often_than_its_bound_within_one_step() -> None:
    """Regression: urgent requests that did not fit were tested before begun prompts and after them,
    with the whole bound each time."""
    core = full_core(max_overtakes=2)
    core.send("large", [2] * 80, priority=0, max_tokens=1)
    for i in range(4):
        core.send(f"urgent{i}", [3], priority=0, max_tokens=1)
    for i in range(4):
        core.send(f"later{i}", [4], priority=1, max_tokens=1)
    core.keep(core.step())
    assert [row.request_id for row in core.plans[-1].rows] == ["urgent0", "urgent1", "begun"]


def test_in_a_strict_queue_nobody_goes_before_one_that_does_not_fit() -> None:
    """This also holds when the step looks at the queue twice, before the prompts that have begun and after them."""
    core = full_core(admission_order="strict")
    core.send("large", [2] * 80, priority=0, max_tokens=1)
    for priority in (0, 1):
        core.send(f"small{priority}", [3], priority=priority, max_tokens=1)
    core.keep(core.step())
    assert [row.request_id for row in core.plans[-1].rows] == ["begun"]
