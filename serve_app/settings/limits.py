"""Owns how much of a deployment, and of each tenant, is let in: the limits, and an ingress replica's share of them.
Never counts anything; that is the gate's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """None: no limit."""

    max_concurrent_requests: int | None = None
    max_queued_tokens: int | None = None
    """Prompt tokens of requests that wait, or have not had their first event. One request alone may exceed it."""


UNLIMITED = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who sends a request. Limits that are None here are those of every tenant."""

    name: str = ""
    limits: Limits = UNLIMITED


ANYBODY = Tenant()
"""The one tenant of a server without API keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatePolicy:
    """The limits of a deployment. Each of its ingress replicas has a gate of its own and keeps its share, rounded up:
    of n replicas, together they may let in up to n - 1 beyond a limit."""

    dispatch_per_engine: int | None = None
    """Most requests that are with an engine at a time; None: no limit, nobody waits at the gate."""
    concurrent_per_engine: int | None = None
    """Times the number of engines, the limit on concurrent requests where `deployment` has none."""
    deployment: Limits = UNLIMITED
    tenant: Limits = UNLIMITED
    ingress_replicas: int = 1

    def capacity(self, num_engines: int) -> int | None:
        """Most requests that an ingress replica may have with the engines."""
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

    def _shared(self, requests: int | None, tokens: int | None) -> Limits:
        return Limits(max_concurrent_requests=self._share(requests), max_queued_tokens=self._share(tokens))

    def _share(self, limit: int | None) -> int | None:
        return None if limit is None else -(-limit // self.ingress_replicas)
