"""Owns the limits of a deployment and of each tenant, and computes an ingress replica's share of them.
Never counts anything: the gate does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a deployment or a tenant; None means no limit."""

    max_concurrent_requests: int | None = None
    max_queued_tokens: int | None = None
    """The most prompt tokens of requests without a first event. A single request may exceed it."""


UNLIMITED = Limits()
MIN_PRIORITY = -(2**31)
"""The most urgent `priority` that a request may have at all; 0 is the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """The sender of a request. For limits that are None, the default of all tenants applies."""

    name: str = ""
    limits: Limits = UNLIMITED
    min_priority: int | None = None


ANYBODY = Tenant()
"""The one tenant of a server without API keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatePolicy:
    """The limits of a deployment. Each ingress replica has a gate of its own and enforces its share, rounded up, so n
    replicas together may let in up to n - 1 requests beyond a limit."""

    dispatch_per_engine: int | None = None
    """The most requests that are with an engine at a time; None means no limit, so that none waits at the gate."""
    concurrent_per_engine: int | None = None
    """Multiplied by the number of engines, this is the limit on concurrent requests if `deployment` has none."""
    deployment: Limits = UNLIMITED
    tenant: Limits = UNLIMITED
    tenant_min_priority: int | None = None
    """The lowest, and so the most urgent, `priority` of a tenant's request; None means no limit."""
    ingress_replicas: int = 1

    def capacity(self, num_engines: int) -> int | None:
        """Return the most requests that an ingress replica may have with the engines."""
        return self._share(None if self.dispatch_per_engine is None else self.dispatch_per_engine * num_engines)

    def of_deployment(self, num_engines: int) -> Limits:
        requests = self.deployment.max_concurrent_requests
        if requests is None and self.concurrent_per_engine is not None:
            requests = self.concurrent_per_engine * num_engines
        return self._shared(requests, self.deployment.max_queued_tokens)

    def of_tenant(self, tenant: Tenant) -> Limits:
        own, default = tenant.limits, self.tenant
        return self._shared(
            default.max_concurrent_requests if own.max_concurrent_requests is None else own.max_concurrent_requests,
            default.max_queued_tokens if own.max_queued_tokens is None else own.max_queued_tokens,
        )

    def min_priority(self, tenant: Tenant) -> int | None:
        return self.tenant_min_priority if tenant.min_priority is None else tenant.min_priority

    def _shared(self, requests: int | None, tokens: int | None) -> Limits:
        return Limits(max_concurrent_requests=self._share(requests), max_queued_tokens=self._share(tokens))

    def _share(self, limit: int | None) -> int | None:
        return None if limit is None else -(-limit // self.ingress_replicas)


RESERVED = 0.5
"""The part of a room that is reserved for its models; the rest is for whichever requests come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomPolicy:
    """The limits that several models share, of which each ingress replica enforces its share, as with GatePolicy."""

    limits: Limits = UNLIMITED
    shares: tuple[float, ...] = ()
    """Each model's, in any unit."""
    ingress_replicas: int = 1

    def requests(self) -> tuple[int, tuple[int, ...]] | None:
        """Return the limit of an ingress replica, and how many of them are reserved for each model; None: no limit."""
        return self._shared(self.limits.max_concurrent_requests)

    def tokens(self) -> tuple[int, tuple[int, ...]] | None:
        """Return the same for queued prompt tokens."""
        return self._shared(self.limits.max_queued_tokens)

    def _shared(self, limit: int | None) -> tuple[int, tuple[int, ...]] | None:
        if limit is None:
            return None
        most = -(-limit // self.ingress_replicas)
        return most, tuple(int(most * RESERVED * share / sum(self.shares)) for share in self.shares)
