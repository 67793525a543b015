"""Knows whether Ray has a place for an engine replica.
Never changes anything in the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Cluster(Protocol):
    async def shortage(self, deployment: str, needs: Mapping[str, float]) -> frozenset[str]:
        """Return which resources a replica of `deployment` waits for; empty if none waits. `needs`: by Ray's names."""
        ...


class RayCluster:
    """The cluster that this process belongs to. Asks Ray's own tables, which no public function shows."""

    def __init__(self, application: str) -> None:
        self._application = application

    async def shortage(self, deployment: str, needs: Mapping[str, float]) -> frozenset[str]:
        return await asyncio.to_thread(self._shortage, deployment, needs)

    def _shortage(self, deployment: str, needs: Mapping[str, float]) -> frozenset[str]:
        from ray._private.state import available_resources_per_node, state

        pending = state.actor_table(None, actor_state_name="PENDING_CREATION").values()
        mark = f"::{self._application}#{deployment}#"
        if not any(mark in actor["Name"] and is_without_place(actor) for actor in pending):
            return frozenset()
        return lacking(needs, list(available_resources_per_node().values()))


def is_without_place(actor: Mapping[str, Any]) -> bool:
    """Whether an actor that is being created has no process yet, as opposed to one that loads. Its node says nothing:
    it is the one that looks for a place."""
    return not actor["Pid"]


def lacking(needs: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> frozenset[str]:
    """Return the resources of which no node has enough, or all that are needed if each is somewhere, but not together;
    empty if a node has room."""
    wanted = {kind: amount for kind, amount in needs.items() if amount}
    if any(all(node.get(kind, 0) >= amount for kind, amount in wanted.items()) for node in nodes):
        return frozenset()
    short = {kind for kind, amount in wanted.items() if all(node.get(kind, 0) < amount for node in nodes)}
    return frozenset(short or wanted)
