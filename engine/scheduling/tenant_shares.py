"""Owns the service that each tenant of a priority has received: a virtual counter (Sheng et al., OSDI 2024).
Never knows a request or a unit: it is told when a tenant gets one request more or less, and what service counts."""

from __future__ import annotations

from engine.scheduling.sorted_list import SortedList

MAX_PAST = 1024
"""Maximum number of tenants of a priority that are remembered without a request. Beyond it, the tenant that is least
ahead of the others is forgotten, since it loses least by that."""

LaneKey = tuple[int, str]
"""A priority and a tenant."""


class _Class:
    """The tenants of one priority.

    A tenant's count only grows while it is present. So `_present` keeps it at the count when it was last looked at, and
    `_least` moves tenants at the front whose count has grown since.
    """

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        self._live: dict[str, int] = {}
        self._present: SortedList[tuple[float, str]] = SortedList()
        self._kept_at: dict[str, float] = {}  # tenant -> its count in `_present`
        self._past: SortedList[tuple[float, str]] = SortedList()

    def __bool__(self) -> bool:
        return bool(self._live)

    def enter(self, tenant: str) -> None:
        if tenant in self._live:
            self._live[tenant] += 1
            return
        if tenant in self.served:
            self._past.remove((self.served[tenant], tenant))
        self.served[tenant] = max(self.served.get(tenant, 0.0), self._least())
        self._live[tenant] = 1
        self._keep(tenant)

    def leave(self, tenant: str) -> None:
        self._live[tenant] -= 1
        if self._live[tenant]:
            return
        del self._live[tenant]
        self._present.remove((self._kept_at.pop(tenant), tenant))
        self._past.add((self.served[tenant], tenant))
        self._forget()

    def _keep(self, tenant: str) -> None:
        self._kept_at[tenant] = self.served[tenant]
        self._present.add((self.served[tenant], tenant))

    def _least(self) -> float:
        """Return the smallest count of the present tenants; 0 if there are none."""
        while self._present:
            kept_at, tenant = self._present.first
            if self.served[tenant] == kept_at:
                return kept_at
            self._present.remove((kept_at, tenant))
            self._keep(tenant)
        return 0.0

    def _forget(self) -> None:
        """Forget past tenants that, on return, would start at the least count anyway, like a new tenant."""
        least = self._least()
        while self._past and (self._past.first[0] <= least or len(self._past) > MAX_PAST):
            served, tenant = self._past.first
            self._past.remove((served, tenant))
            del self.served[tenant]


class Shares:
    """Counters of all present tenants, and of past ones while they matter.

    A tenant that was away gets no credit for the service of others meanwhile: on return it starts at the least count of
    the present tenants, or at its own old count if that is higher. So once the least count has caught up with a past
    tenant, it can be forgotten without loss.
    """

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}
        self.count = False
        """Whether several tenants or priorities are present, so that service must be counted. Stored rather than
        computed, because every row of every step needs it."""

    def __len__(self) -> int:
        """Return the number of remembered tenants, counted separately for each priority."""
        return sum(len(tenants.served) for tenants in self._classes.values())

    def enter(self, key: LaneKey) -> None:
        """Note that the tenant has one more request."""
        priority, tenant = key
        self._classes.setdefault(priority, _Class()).enter(tenant)
        self._look()

    def leave(self, key: LaneKey) -> None:
        """Note that the tenant has one request less. When no tenant of its priority is left, all counts start over."""
        priority, tenant = key
        self._classes[priority].leave(tenant)
        if not self._classes[priority]:
            del self._classes[priority]
        self._look()

    def serve(self, key: LaneKey, amount: float) -> None:
        """Count what was computed for a request of the tenant; see `service` for the unit."""
        self._classes[key[0]].served[key[1]] += amount

    def served(self, key: LaneKey) -> float:
        return self._classes[key[0]].served[key[1]]

    def _look(self) -> None:
        self.count = len(self._classes) > 1 or any(len(tenants.served) > 1 for tenants in self._classes.values())
