"""Owns the count of requests that are at no gate: bodies that are being read, and routes that need no engine.
Never knows which model a request is for: its gate, if it goes to one, decides about the model's limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.protocol import RequestRejected
from serve_app.admission.gate import Gate
from serve_app.admission.room import Account
from serve_app.errors.api_error import ApiError, overloaded
from serve_app.settings.limits import Tenant


class Arrivals:
    """Counts a request from before its body is read, because a body takes memory and reading it takes time. A tenant's
    arrivals count among its requests. There may be as many arrivals as the gate with the most room lets in."""

    def __init__(self, gates: Sequence[Gate]) -> None:
        """`gates`: those of all models, which share their tenants' counts."""
        self._gates = tuple(gates)
        self._amount = 0

    @property
    def amount(self) -> int:
        return self._amount

    @contextmanager
    def enter(self, tenant: Tenant) -> Iterator[Arrival]:
        """Count a request until the block ends, or it leaves.

        Raises:
            ApiError: 429, the tenant's limit is reached; 503, there are too many arrivals.
        """
        first = self._gates[0]
        first.check_tenant(tenant)
        limit = self._limit()
        if limit is not None and self._amount >= max(1, limit):
            raise overloaded("requests", limit, first.retry_after_s())
        arrival = Arrival(self, first.account(tenant))
        try:
            yield arrival
        finally:
            arrival.leave()

    def check_gates(self, tenant: Tenant) -> None:
        """Raise what the first gate would raise now if every gate would refuse a request."""
        refusals: list[ApiError | RequestRejected] = []
        for gate in self._gates:
            try:
                gate.check(tenant)
            except (ApiError, RequestRejected) as refusal:
                refusals.append(refusal)
            else:
                return
        raise refusals[0]

    def _limit(self) -> int | None:
        limits = [gate.max_requests for gate in self._gates]
        return None if None in limits else max(filter(None, limits))

    # --- called by Arrival only -------------------------------------------------------------------------------------

    def _add(self, account: Account) -> None:
        self._amount += 1
        account.requests.add(1)

    def _remove(self, account: Account) -> None:
        self._amount -= 1
        account.requests.remove(1, served=False)


class Arrival:
    """One request that is counted."""

    def __init__(self, arrivals: Arrivals, account: Account) -> None:
        self._arrivals = arrivals
        self._account = account
        self._is_counted = True
        arrivals._add(account)

    def leave(self) -> None:
        """Stop counting the request, because it goes to its gate or has ended. Idempotent."""
        if self._is_counted:
            self._is_counted = False
            self._arrivals._remove(self._account)
