"""Decides before the engines which requests are refused, which wait for a place, and which is next.
Never knows HTTP, engines or text: it counts requests and prompt tokens, and all of it runs on one event loop."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from engine.protocol import SURELY_LATE, EngineError, ErrorCode, RequestRejected, Submission, why_late
from serve_app.admission.backlog import Backlog, bounded
from serve_app.admission.fleet_forecast import FleetForecast
from serve_app.admission.room import Account, Room
from serve_app.errors.api_error import overloaded, rate_limited, too_urgent
from serve_app.settings.limits import ANYBODY, GatePolicy, Tenant

_OPEN = GatePolicy()
MOST_PREDICTED = 8
"""How many of a request's prompts are judged by its deadline: a look at the engines' caches for one takes a
millisecond."""


@dataclass(frozen=True, slots=True)
class GateSnapshot:
    """The state of one ingress replica's gate. A request is live from its arrival to the end of its answer."""

    draining: bool
    num_live: int
    num_waiting: int
    num_dispatched: int
    capacity: int | None
    """The most requests that may be dispatched; None means no limit."""
    num_queued_tokens: int
    requests_per_s: float
    """The measured drain rates of requests and, below, of prompt tokens."""
    tokens_per_s: float

    @classmethod
    def total(cls, snapshots: Sequence[GateSnapshot]) -> GateSnapshot:
        """Add up the gates of several models."""
        capacities = [one.capacity for one in snapshots]
        return cls(
            draining=any(one.draining for one in snapshots),
            num_live=sum(one.num_live for one in snapshots),
            num_waiting=sum(one.num_waiting for one in snapshots),
            num_dispatched=sum(one.num_dispatched for one in snapshots),
            capacity=None if None in capacities else sum(filter(None, capacities)),
            num_queued_tokens=sum(one.num_queued_tokens for one in snapshots),
            requests_per_s=sum(one.requests_per_s for one in snapshots),
            tokens_per_s=sum(one.tokens_per_s for one in snapshots),
        )


class Gate:
    """Binds requests to engines late: the engines get as many requests as they can use, and the others wait here, where
    they can still go to any engine. Within a tenant the first to come is served first; tenants take turns."""

    def __init__(
        self,
        policy: GatePolicy = _OPEN,
        num_engines: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        forecast: Callable[[], FleetForecast | None] = lambda: None,
        wall_clock: Callable[[], float] = time.time,
        room: Room | None = None,
        num_leaving: Callable[[], int] = lambda: 0,
    ) -> None:
        """`num_engines`: how many engines are known now; None and 0 count as one, so that a first request can start an
        engine. `clock` gives monotonic seconds. `forecast`: what the engines predict, by `wall_clock`, if they do.
        `room`: what the gates of several models share, besides the limits that each has. `num_leaving`: how many
        requests are with engines that take no others, and so have no place of those that stay."""
        self._policy = policy
        self._forecast = forecast
        self._wall_clock = wall_clock
        self._known_engines = num_engines
        self._clock = clock
        self._all = Account(clock)
        self._place = None if room is None else room.join(self._all)
        # By tenant, so at most as many as the keys name.
        self._accounts: dict[str, Account] = {} if room is None else room.tenants
        # The waiting requests: a queue for each tenant, first that of the tenant whose turn it is.
        self._queues: OrderedDict[str, OrderedDict[AdmissionTicket, None]] = OrderedDict()
        self._num_dispatched = 0
        self._num_leaving = num_leaving
        self._draining = False
        self._empty = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        return self._draining

    def check_open(self) -> None:
        """Raise RequestRejected if the deployment drains."""
        if self._draining:
            raise RequestRejected(
                ErrorCode.DRAINING, "This replica of the server is draining and takes no new requests."
            )

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def snapshot(self) -> GateSnapshot:
        return GateSnapshot(
            draining=self._draining,
            num_live=self._all.requests.amount,
            num_waiting=self.num_waiting,
            num_dispatched=self._num_dispatched,
            capacity=self._policy.capacity(self._num_engines()),
            num_queued_tokens=self._all.tokens.amount,
            requests_per_s=self._all.requests.per_second,
            tokens_per_s=self._all.tokens.per_second,
        )

    def enter(self, tenant: Tenant = ANYBODY) -> AdmissionTicket:
        """Let a request in before anything is spent on it. The ticket is a context manager, and ends with its block.

        Raises:
            ApiError: 429 or 503, a limit of the tenant or of the deployment is reached.
            RequestRejected: the deployment drains.
        """
        self.check(tenant)
        return AdmissionTicket(self, tenant, self.account(tenant))

    def check(self, tenant: Tenant) -> None:
        """Raise what `enter` would raise now."""
        self.check_open()
        self.check_tenant(tenant)
        self._check_requests()
        self._check_tokens(tenant, 1)  # every prompt has at least one token, so the body need not be tokenized for this

    def check_tenant(self, tenant: Tenant) -> None:
        """Raise ApiError, a 429, if the tenant may have no further request."""
        requests, limit = self.account(tenant).requests, self._policy.of_tenant(tenant).max_concurrent_requests
        if limit is not None and (excess := _excess(requests, 1, limit)):
            raise rate_limited("requests", limit, 0, requests.wait_s(excess))

    def check_priority(self, priority: int, tenant: Tenant) -> None:
        """Raise ApiError, a 400, if requests of the tenant may not go before others by so much."""
        least = self._policy.min_priority(tenant)
        if least is not None and priority < least:
            raise too_urgent(priority, least)

    def account(self, tenant: Tenant) -> Account:
        """Return the counts of a tenant, which are those of all models together."""
        return self._accounts.get(tenant.name) or self._accounts.setdefault(tenant.name, Account(self._clock))

    @property
    def max_requests(self) -> int | None:
        """The most requests that are let in now; None means no limit."""
        own = self._own_limit()
        shared = None if self._place is None else self._place.requests()
        return min((limit for limit in (own, shared and shared[0]) if limit is not None), default=None)

    def retry_after_s(self) -> float:
        """Estimate the seconds until there is room for a request, for refusals by others than the gate."""
        return self._wait_s(self._all.requests.wait_s(1))

    def check_deadline(self, prompts: Sequence[Submission], left_s: float, deadline_s: float) -> None:
        """Check the prompts of a request that must have ended in `left_s`, which asked for `deadline_s` when it came.

        Raises:
            EngineError: no engine can meet the deadline, even if predictions are wrong by half.
        """
        if (forecast := self._forecast()) is None:
            return
        for prompt in prompts[:MOST_PREDICTED]:
            takes_s = forecast.prompt_s(prompt, SURELY_LATE * left_s)
            if why := why_late("its prompt", takes_s, left_s, deadline_s):
                raise EngineError(ErrorCode.DEADLINE_EXCEEDED, f"The request was ended at once: {why}.")

    def refresh(self) -> None:
        """Use new capacity. Arrivals and departures call this by themselves; call it when an engine joins."""
        capacity = self._policy.capacity(self._num_engines())
        if capacity is not None and self._queues and self._num_dispatched >= capacity:  # otherwise it need not be known
            capacity += self._num_leaving()
        while self._queues and (capacity is None or self._num_dispatched < capacity):
            self._num_dispatched += self._next().admit()

    def close(self) -> None:
        """Refuse new requests until `reopen`; those inside continue."""
        self._draining = True

    def reopen(self) -> None:
        self._draining = False

    async def drain(self, timeout_s: float) -> int:
        """Close, and wait until all requests inside have left. After `timeout_s`, end those that wait here with
        DRAINING; the caller must end those that are with the engines.

        Returns:
            How many requests were still inside.
        """
        self.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._all.requests.amount:
                    self._empty.clear()
                    await self._empty.wait()
        num_late = self._all.requests.amount
        for ticket in [ticket for queue in self._queues.values() for ticket in queue]:
            text = "This replica of the server is draining; this request did not run."
            ticket.refuse(RequestRejected(ErrorCode.DRAINING, text))
        return num_late

    # --- limits -----------------------------------------------------------------------------------------------------

    def _wait_s(self, measured_s: float) -> float:
        """Return the seconds until the least loaded engine has computed the prompts that it has, where engines predict
        that; else, or if it has none and lacks something else, what the drain rate says."""
        forecast = self._forecast()
        predicted_s = 0.0 if forecast is None else forecast.wait_s(self._wall_clock())
        return bounded(predicted_s) if predicted_s else measured_s

    def _num_engines(self) -> int:
        return max(1, self._known_engines() or 0)

    def _own_limit(self) -> int | None:
        """Return the most requests of this model. If the engines' number says it, those on engines that leave are
        beside it."""
        limit = self._policy.of_deployment(self._num_engines()).max_concurrent_requests
        if limit is None or self._policy.deployment.max_concurrent_requests is not None:
            return limit
        return limit + self._num_leaving() if self._all.requests.amount >= limit else limit

    def _check_requests(self) -> None:
        limit = self._own_limit()
        if limit is not None and (excess := _excess(self._all.requests, 1, limit)):
            raise overloaded("requests", limit, self._wait_s(self._all.requests.wait_s(excess)))
        shared = None if self._place is None else self._place.requests()
        if shared is not None and shared[1]:
            raise overloaded("requests", shared[0], self._wait_s(self._all.requests.wait_s(shared[1])))

    def _check_tokens(self, tenant: Tenant, num_tokens: int) -> None:
        tokens, limit = self.account(tenant).tokens, self._policy.of_tenant(tenant).max_queued_tokens
        if limit is not None and (excess := _excess(tokens, num_tokens, limit)):
            raise rate_limited("tokens", limit, max(0, limit - tokens.amount), tokens.wait_s(excess))
        limit = self._policy.of_deployment(self._num_engines()).max_queued_tokens
        if limit is not None and (excess := _excess(self._all.tokens, num_tokens, limit)):
            raise overloaded("tokens", limit, self._wait_s(self._all.tokens.wait_s(excess)))
        shared = None if self._place is None else self._place.tokens(num_tokens)
        if shared is not None and shared[1]:
            raise overloaded("tokens", shared[0], self._wait_s(self._all.tokens.wait_s(shared[1])))

    # --- called by AdmissionTicket only -----------------------------------------------------------------------------

    def _next(self) -> AdmissionTicket:
        """Take the next request out of its queue; its tenant is last from then on."""
        tenant, queue = next(iter(self._queues.items()))
        ticket, _ = queue.popitem(last=False)
        if queue:
            self._queues.move_to_end(tenant)
        else:
            del self._queues[tenant]
        return ticket

    def _enqueue(self, ticket: AdmissionTicket, num_tokens: int) -> None:
        self._check_tokens(ticket.tenant, num_tokens)
        for account in (self._all, ticket.account):
            account.tokens.add(num_tokens)
        self._queues.setdefault(ticket.tenant.name, OrderedDict())[ticket] = None
        self.refresh()

    def _register(self, ticket: AdmissionTicket) -> None:
        for account in (self._all, ticket.account):
            account.requests.add(1)

    def _release_tokens(self, ticket: AdmissionTicket, num_tokens: int, *, served: bool) -> None:
        for account in (self._all, ticket.account):
            account.tokens.remove(num_tokens, served=served)

    def _release_places(self, num_places: int) -> None:
        self._num_dispatched -= num_places
        self.refresh()

    def _leave_queue(self, ticket: AdmissionTicket) -> None:
        if (queue := self._queues.get(ticket.tenant.name)) is not None:
            queue.pop(ticket, None)
            if not queue:
                del self._queues[ticket.tenant.name]

    def _deregister(self, ticket: AdmissionTicket, *, served: bool) -> None:
        for account in (self._all, ticket.account):
            account.requests.remove(1, served=served)
        if not self._all.requests.amount:
            self._empty.set()


class AdmissionTicket:
    """Takes one request through the gate: it enters, waits for places with the engines (one per answer), gets its first
    event, gives the places back, and leaves. Leaving the block ends all of this at any stage."""

    def __init__(self, gate: Gate, tenant: Tenant, account: Account) -> None:
        self.tenant = tenant
        self.account = account
        self._gate = gate
        self._turn: asyncio.Future[RequestRejected | None] = asyncio.get_running_loop().create_future()
        self._num_queued_tokens = 0
        self._num_wanted = 1
        self._num_places = 0
        self._num_behind = 0
        """Answers that get the place of one that has ended."""
        self._num_answer_tokens = 0
        """The tokens of one of them, in the mean."""
        self._has_started = False

    def __enter__(self) -> AdmissionTicket:
        self._gate._register(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._gate._leave_queue(self)
        self._forget_tokens(served=False)
        self._release_places(self._num_places)
        self._gate._deregister(self, served=self._has_started)

    async def dispatched(self, num_tokens: int, num_answers: int = 1, num_at_once: int | None = None) -> None:
        """Wait for places with the engines, for prompts of `num_tokens` in total. The request gets all its places as
        soon as one is free: if it waited for several at once, it might wait forever. `num_at_once`: how many answers it
        asks for at the same time, each of which needs a place; None: for all.

        Raises:
            ApiError: 429 or 503, there are too many tokens to queue.
            RequestRejected: the deployment drains, and the wait took too long.
        """
        self._num_wanted = num_answers if num_at_once is None else min(num_answers, num_at_once)
        self._num_behind = num_answers - self._num_wanted
        self._gate._enqueue(self, num_tokens)
        self._num_queued_tokens = num_tokens
        self._num_answer_tokens = num_tokens // num_answers
        if refusal := await self._turn:
            raise refusal

    def started(self) -> None:
        """Note that the engine has begun with the prompt, which is no longer queued; those of answers without a place
        are. Idempotent."""
        self._has_started = True
        self._forget_tokens(served=True, but=self._num_behind * self._num_answer_tokens)

    def finished(self) -> None:
        """Note that the engine has finished an answer, which needs no place any more. No effect after the block."""
        if self._num_behind:
            self._num_behind -= 1
        else:
            self._release_places(min(1, self._num_places))

    def _release_places(self, num_places: int) -> None:
        if num_places:
            self._num_places -= num_places
            self._gate._release_places(num_places)

    # --- called by the gate -----------------------------------------------------------------------------------------

    def admit(self) -> int:
        """Give the request its places, and return how many; 0 if it has left meanwhile."""
        if self._turn.done():
            return 0
        self._turn.set_result(None)
        self._num_places = self._num_wanted
        return self._num_places

    def refuse(self, refusal: RequestRejected) -> None:
        """End the request's wait. It leaves the queue when its block ends."""
        if not self._turn.done():
            self._turn.set_result(refusal)

    def _forget_tokens(self, *, served: bool, but: int = 0) -> None:
        if (num_tokens := self._num_queued_tokens - but) > 0:
            self._gate._release_tokens(self, num_tokens, served=served)
            self._num_queued_tokens = but


def _excess(backlog: Backlog, more: int, limit: int) -> int:
    """By how much `more` would exceed the limit. A request that comes alone never does: waiting would not help it."""
    return max(0, backlog.amount + more - limit) if backlog.amount else 0
