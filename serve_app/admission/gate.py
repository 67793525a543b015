"""Owns the gate before the engines: who is refused, who waits for a place, and who is next.
Never knows HTTP, engines or text: it counts requests and prompt tokens, and all of it runs on one event loop."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from engine.protocol import ErrorCode, RequestRejected
from serve_app.admission.backlog import Backlog
from serve_app.errors.api_error import overloaded, rate_limited
from serve_app.settings.limits import ANYBODY, GatePolicy, Tenant

_OPEN = GatePolicy()


@dataclass(frozen=True, slots=True)
class GateSnapshot:
    """One ingress replica's gate at a moment. A request is live from its arrival to the end of its answer."""

    draining: bool
    num_live: int
    num_waiting: int
    num_dispatched: int
    capacity: int | None
    """Most that may be dispatched; None: no limit."""
    num_queued_tokens: int
    requests_per_s: float
    """Measured drain rates, of requests and of prompt tokens."""
    tokens_per_s: float


class _Account:
    """What is counted for the deployment, and for each tenant."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.requests = Backlog(clock)
        self.tokens = Backlog(clock)


class Gate:
    """Late binding: at most as many requests as the engines can use are with them; the others wait here, where they can
    still go to any engine. First come, first served within a tenant; tenants take turns."""

    def __init__(
        self,
        policy: GatePolicy = _OPEN,
        num_engines: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_engines`: how many are known now; None and 0 count as one, so that a first request can start it.
        `clock` gives monotonic seconds."""
        self._policy = policy
        self._known_engines = num_engines
        self._clock = clock
        self._all = _Account(clock)
        self._accounts: dict[str, _Account] = {}  # by tenant: as many as the keys name
        # Visits that wait: a line for each tenant, the tenant whose turn it is first.
        self._lines: OrderedDict[str, OrderedDict[Visit, None]] = OrderedDict()
        self._num_dispatched = 0
        self._draining = False
        self._empty = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        return self._draining

    def check_open(self) -> None:
        """Return unless the deployment drains, which raises RequestRejected."""
        if self._draining:
            raise RequestRejected(ErrorCode.DRAINING, "The deployment is draining and takes no new requests.")

    @property
    def num_waiting(self) -> int:
        return sum(len(line) for line in self._lines.values())

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

    def enter(self, tenant: Tenant = ANYBODY) -> Visit:
        """Let a request in before anything is spent on it. The visit is a context manager, and ends with its block.

        Raises:
            ApiError: 429 or 503, a limit of the tenant or of the deployment is reached.
            RequestRejected: the deployment drains.
        """
        self.check_open()
        account = self._accounts.get(tenant.name) or self._accounts.setdefault(tenant.name, _Account(self._clock))
        visit = Visit(self, tenant, account)
        self._check_requests(visit)
        self._check_tokens(visit, 1)  # any prompt has one: no body need be tokenized to know
        return visit

    def retry_after_s(self) -> float:
        """Seconds until the next request is likely to end, for refusals that are not the gate's."""
        return self._all.requests.wait_s(1)

    def refresh(self) -> None:
        """Use capacity that has come. Arrivals and departures look by themselves; an engine that joins is neither."""
        capacity = self._policy.capacity(self._num_engines())
        while self._lines and (capacity is None or self._num_dispatched < capacity):
            self._num_dispatched += self._next().admit()

    def close(self) -> None:
        """Refuse new requests until `reopen`; those inside go on."""
        self._draining = True

    def reopen(self) -> None:
        self._draining = False

    async def drain(self, timeout_s: float) -> int:
        """Close, and wait until all who are inside have left. After `timeout_s`, those that wait here are ended with
        DRAINING; those that are with the engines are left to the caller to end.

        Returns:
            How many were still inside.
        """
        self.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._all.requests.amount:
                    self._empty.clear()
                    await self._empty.wait()
        num_late = self._all.requests.amount
        for visit in [visit for line in self._lines.values() for visit in line]:
            visit.refuse(RequestRejected(ErrorCode.DRAINING, "The deployment is draining; this request did not run."))
        return num_late

    # --- limits -----------------------------------------------------------------------------------------------------

    def _num_engines(self) -> int:
        return max(1, self._known_engines() or 0)

    def _check_requests(self, visit: Visit) -> None:
        limit = self._policy.of_tenant(visit.tenant).max_concurrent_requests
        if limit is not None and (excess := _excess(visit.account.requests, 1, limit)):
            raise rate_limited("requests", limit, 0, visit.account.requests.wait_s(excess))
        limit = self._policy.of_deployment(self._num_engines()).max_concurrent_requests
        if limit is not None and (excess := _excess(self._all.requests, 1, limit)):
            raise overloaded("requests", limit, self._all.requests.wait_s(excess))

    def _check_tokens(self, visit: Visit, num_tokens: int) -> None:
        limit = self._policy.of_tenant(visit.tenant).max_queued_tokens
        if limit is not None and (excess := _excess(visit.account.tokens, num_tokens, limit)):
            left = max(0, limit - visit.account.tokens.amount)
            raise rate_limited("tokens", limit, left, visit.account.tokens.wait_s(excess))
        limit = self._policy.of_deployment(self._num_engines()).max_queued_tokens
        if limit is not None and (excess := _excess(self._all.tokens, num_tokens, limit)):
            raise overloaded("tokens", limit, self._all.tokens.wait_s(excess))

    # --- visits: called by Visit only -------------------------------------------------------------------------------

    def _next(self) -> Visit:
        """Take the next visit out of its line; its tenant is last from then on."""
        tenant, line = next(iter(self._lines.items()))
        visit, _ = line.popitem(last=False)
        if line:
            self._lines.move_to_end(tenant)
        else:
            del self._lines[tenant]
        return visit

    def _queue(self, visit: Visit, num_tokens: int) -> None:
        self._check_tokens(visit, num_tokens)
        for account in (self._all, visit.account):
            account.tokens.add(num_tokens)
        self._lines.setdefault(visit.tenant.name, OrderedDict())[visit] = None
        self.refresh()

    def _come(self, visit: Visit) -> None:
        for account in (self._all, visit.account):
            account.requests.add(1)

    def _compute(self, visit: Visit, num_tokens: int, *, served: bool) -> None:
        for account in (self._all, visit.account):
            account.tokens.remove(num_tokens, served=served)

    def _give_back(self, num_places: int) -> None:
        self._num_dispatched -= num_places
        self.refresh()

    def _leave_line(self, visit: Visit) -> None:
        if (line := self._lines.get(visit.tenant.name)) is not None:
            line.pop(visit, None)
            if not line:
                del self._lines[visit.tenant.name]

    def _go(self, visit: Visit, *, served: bool) -> None:
        for account in (self._all, visit.account):
            account.requests.remove(1, served=served)
        if not self._all.requests.amount:
            self._empty.set()


class Visit:
    """One request's way through the gate: it comes, waits for its places with the engines, one for each answer that it
    wants, has its first event, gives the places back, goes. Leaving the block ends the visit wherever it is."""

    def __init__(self, gate: Gate, tenant: Tenant, account: _Account) -> None:
        self.tenant = tenant
        self.account = account
        self._gate = gate
        self._turn: asyncio.Future[RequestRejected | None] = asyncio.get_running_loop().create_future()
        self._num_queued_tokens = 0
        self._num_wanted = 1
        self._num_places = 0
        self._has_started = False

    def __enter__(self) -> Visit:
        self._gate._come(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._gate._leave_line(self)
        self._forget_tokens(served=False)
        self._leave(self._num_places)
        self._gate._go(self, served=self._has_started)

    async def dispatched(self, num_tokens: int, num_answers: int = 1) -> None:
        """Wait for places with the engines, for prompts of `num_tokens` together. It gets all of them as soon as one is
        free: a request that waited for many at a time could wait for ever.

        Raises:
            ApiError: 429 or 503, that many tokens are too many to queue.
            RequestRejected: the deployment drains, and the wait took too long.
        """
        self._num_wanted = num_answers
        self._gate._queue(self, num_tokens)
        self._num_queued_tokens = num_tokens
        if refusal := await self._turn:
            raise refusal

    def started(self) -> None:
        """The engine has begun with the prompt, which is no longer queued. Idempotent."""
        self._has_started = True
        self._forget_tokens(served=True)

    def finished(self) -> None:
        """The engine has done its part of an answer; the rest of it needs no place. Without effect after the visit."""
        self._leave(min(1, self._num_places))

    def _leave(self, num_places: int) -> None:
        if num_places:
            self._num_places -= num_places
            self._gate._give_back(num_places)

    # --- called by the gate -----------------------------------------------------------------------------------------

    def admit(self) -> int:
        """Give it its places: how many, 0 if it has left meanwhile."""
        if self._turn.done():
            return 0
        self._turn.set_result(None)
        self._num_places = self._num_wanted
        return self._num_places

    def refuse(self, refusal: RequestRejected) -> None:
        """End its wait. It leaves the line with its block."""
        if not self._turn.done():
            self._turn.set_result(refusal)

    def _forget_tokens(self, *, served: bool) -> None:
        if self._num_queued_tokens:
            self._gate._compute(self, self._num_queued_tokens, served=served)
            self._num_queued_tokens = 0


def _excess(backlog: Backlog, more: int, limit: int) -> int:
    """By how much `more` would exceed the limit. What comes alone never does: it could wait for no better moment."""
    return max(0, backlog.amount + more - limit) if backlog.amount else 0
