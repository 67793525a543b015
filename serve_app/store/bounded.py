"""Owns kept answers by tenant and id: as many as fit into a number of bytes and are young enough.
Never lets one tenant push out another that keeps less: the tenant that keeps most loses its least recently used."""

from __future__ import annotations

import time
from collections.abc import Callable

from serve_app.store.entry import Entry, Recalled, Wanted
from serve_app.store.tenant_store import TenantStore, size_of

_EMPTY = TenantStore()


class BoundedStore:
    """For one thread. Looks at its clock whenever it is asked: what is too old is never found."""

    def __init__(self, max_bytes: int, max_age_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """`max_age_s`: since an answer's last use. A conversation that goes on keeps its beginning."""
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._now = now
        self._stores: dict[str, TenantStore] = {}

    @property
    def num_bytes(self) -> int:
        return sum(own.num_bytes for own in self._stores.values())

    @property
    def num_entries(self) -> int:
        return sum(map(len, self._stores.values()))

    def put(self, tenant: str, entry: Entry) -> bool:
        """Keep an answer, whose id is new. Return False if it is larger than the store, or than what is left by other
        tenants that keep less, or if what it goes on from is not kept."""
        self.expire()
        if size_of(entry) > self._max_bytes:
            return False
        own = self._stores.setdefault(tenant, TenantStore())
        own.put(entry, self._now())
        self._make_room()
        if entry.previous is not None and entry.previous not in own:  # a conversation larger than the store
            own.remove(entry.response_id)
            self._forget_empty(tenant)
        return entry.response_id in own

    def get(self, tenant: str, response_id: str) -> Entry | None:
        self.expire()
        return self._own(tenant).use(response_id, self._now())

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete an answer. Return False if there is none."""
        self.expire()
        is_gone = self._own(tenant).remove(response_id)
        self._forget_empty(tenant)
        return is_gone

    def recall(self, tenant: str, wanted: Wanted) -> Recalled:
        """Find what a request refers to. Each response and item found counts as used now."""
        self.expire()
        return _recall(self._own(tenant), wanted, self._now())

    def expire(self) -> float | None:
        """Forget what is too old. Return the seconds until the next entry is too old, or None if there is none."""
        now = self._now()
        for tenant, own in list(self._stores.items()):
            while len(own) and now - own.oldest_use >= self._max_age_s:
                own.remove_oldest()
            self._forget_empty(tenant)
        oldest = min((own.oldest_use for own in self._stores.values()), default=None)
        return None if oldest is None else oldest + self._max_age_s - now

    def _own(self, tenant: str) -> TenantStore:
        return self._stores.get(tenant, _EMPTY)

    def _make_room(self) -> None:
        while self.num_bytes > self._max_bytes:
            tenant, own = max(self._stores.items(), key=lambda one: one[1].num_bytes)
            own.remove_oldest()
            self._forget_empty(tenant)

    def _forget_empty(self, tenant: str) -> None:
        if tenant in self._stores and not len(self._stores[tenant]):
            del self._stores[tenant]


def _recall(own: TenantStore, wanted: Wanted, now: float) -> Recalled:
    left, links, name = wanted.max_bytes, [], wanted.previous
    while name is not None:  # from the last to the first, which is so the most recently used: the others need it
        entry = own.use(name, now)
        if entry is None:
            return Recalled(missing=name)
        links.append(entry)
        left -= sum(map(len, entry.conversation))
        if left < 0:
            return Recalled(is_too_large=True)
        name = entry.previous
    items: dict[str, bytes] = {}
    for response_id, item_id in wanted.items:
        entry = own.use(response_id, now)
        found = None if entry is None else entry.output.get(item_id)
        if found is None:
            return Recalled(missing=item_id)
        items[item_id] = found
        left -= len(found)
        if left < 0:
            return Recalled(is_too_large=True)
    return Recalled(tuple(text for entry in reversed(links) for text in entry.conversation), items)
