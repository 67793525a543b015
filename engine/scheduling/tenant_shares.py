"""Owns what each tenant of a priority was served, in virtual tokens (Sheng et al., OSDI 2024), and for how long.
Never knows a request: it is told when a tenant has one more, and one less."""

from __future__ import annotations

from engine.scheduling.sorted_list import SortedList

MAX_PAST = 1024
"""Tenants of a priority that are remembered although they have no request. Beyond it, the one that is least ahead of
the others is forgotten: no other loses less by it."""

LaneKey = tuple[int, str]
"""A priority and a tenant."""


class _Class:
    """The tenants of one priority.

    A tenant's count only grows while it is present, so `_present` keeps it where it stood when it was last looked at,
    and `least` moves those in front that have grown since.
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
        """What the least served of those present was; 0 where nobody is."""
        while self._present:
            kept_at, tenant = self._present.first
            if self.served[tenant] == kept_at:
                return kept_at
            self._present.remove((kept_at, tenant))
            self._keep(tenant)
        return 0.0

    def _forget(self) -> None:
        """Those who would start where the least served one is if they came back, as a new tenant does."""
        least = self._least()
        while self._past and (self._past.first[0] <= least or len(self._past) > MAX_PAST):
            served, tenant = self._past.first
            self._past.remove((served, tenant))
            del self.served[tenant]


class Shares:
    """Counters of all tenants that are present, and of past ones for as long as they make a difference.

    A tenant that was away is not owed what others were served meanwhile: it starts where the least served of those
    present is, or where it stopped, if it is ahead of that. So once the least served one has caught up with a past
    tenant, nothing is lost by forgetting it.
    """

    def __init__(self, answer_weight: float) -> None:
        self._answer_weight = answer_weight
        self._classes: dict[int, _Class] = {}
        self.count = False
        """Several tenants or priorities are present, so that what each is served has to be counted. Kept, not worked
        out, because every row of every step asks."""

    def __len__(self) -> int:
        """Tenants that are remembered, those of each priority apart."""
        return sum(len(tenants.served) for tenants in self._classes.values())

    def enter(self, key: LaneKey) -> None:
        """The tenant has one more request."""
        priority, tenant = key
        self._classes.setdefault(priority, _Class()).enter(tenant)
        self._look()

    def leave(self, key: LaneKey) -> None:
        """The tenant has one less. Once nobody of its priority is left, nothing is to be shared and all start over."""
        priority, tenant = key
        self._classes[priority].leave(tenant)
        if not self._classes[priority]:
            del self._classes[priority]
        self._look()

    def serve(self, key: LaneKey, prompt_tokens: int, answer_tokens: int) -> None:
        """Count what was computed for a request of the tenant."""
        self._classes[key[0]].served[key[1]] += prompt_tokens + self._answer_weight * answer_tokens

    def served(self, key: LaneKey) -> float:
        return self._classes[key[0]].served[key[1]]

    def _look(self) -> None:
        self.count = len(self._classes) > 1 or any(len(tenants.served) > 1 for tenants in self._classes.values())
