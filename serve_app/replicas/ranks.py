"""Owns the Ray actors in which the followers of an engine run, each in its bundle of the replica's placement group.
Never knows what a rank computes: it hands on bytes, starts and ends processes, and says how one ended."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib import import_module

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, get_current_placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serve_app.settings.ranks import ONE_NODE, Placement

FOLLOWER = "engine.build.follower"
"""The module whose `follow(specification)` is a rank, until the leader ends."""

logger = logging.getLogger(__name__)


class Follower:
    """One rank in a process of its own; a Ray actor. It ends with the replica that started it, which owns it."""

    def run(self, module: str, spec: bytes) -> None:
        """Be a rank until its leader ends. The module is imported here, because it brings torch."""
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch reads it once; engine.build.engine says why
        import_module(module).follow(spec)


class RayRankProcess:
    """A follower's process. Its methods may be called by any thread."""

    def __init__(self, rank: int, actor: ActorHandle, running: ray.ObjectRef[None]) -> None:
        """`running`: the actor's one call, which lasts as long as the rank does."""
        self._rank, self._actor, self._running = rank, actor, running
        self._ended: str | None = None
        self._is_killed = False

    def poll(self) -> str | None:
        """Return None while the rank runs, or waits for its place; else how it ended, in words. Does not block."""
        if self._ended is None:
            done, _ = ray.wait([self._running], timeout=0, fetch_local=False)
            self._ended = self._how() if done else None
        return self._ended

    def _how(self) -> str:
        try:
            ray.get(self._running)
        except RayTaskError as error:
            return f"rank {self._rank} failed: {error.cause!r}"
        except RayActorError as error:
            return f"the process of rank {self._rank} is gone: {_first_line(error)}"
        except RayError as error:  # its answer was lost with its node
            return f"rank {self._rank} is gone: {_first_line(error)}"
        return f"rank {self._rank} has returned"

    def kill(self) -> None:
        """End the process at once. A second call does nothing."""
        if not self._is_killed:
            self._is_killed = True
            ray.kill(self._actor, no_restart=True)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


class RayRankLauncher:
    """Starts the followers of this replica's engine, rank i in bundle i of its placement group. The replica itself is
    rank 0, in the first bundle."""

    def __init__(
        self, group: PlacementGroup, options: dict[str, float | str], placement: Placement, module: str = FOLLOWER
    ) -> None:
        """`options`: resources of each rank, as of a Ray actor; see serve_app.settings.ranks.rank_options."""
        self._group, self._options, self._placement, self._module = group, options, placement, module

    @property
    def remote_host(self) -> str | None:
        return None if self._placement == ONE_NODE else ray.util.get_node_ip_address()

    def ranks_beside(self, rank: int, size: int) -> Sequence[int]:
        if self._placement == ONE_NODE:
            return range(size)
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        return [other for other in range(size) if nodes[other] == nodes[rank]]

    def start(self, rank: int, spec: bytes) -> RayRankProcess:
        """Start a follower; returns before it runs.

        Raises:
            ValueError: the placement group has no bundle for this rank.
        """
        most = self._group.bundle_count - 1
        if not 1 <= rank <= most:
            raise ValueError(f"rank is {rank}: the replica's placement group has bundles for ranks 1 to {most}.")
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        remote = ray.remote(Follower).options(**self._options, scheduling_strategy=place, max_restarts=0)
        actor = remote.remote()
        logger.info("Rank %d starts in bundle %d of %d.", rank, rank, most + 1)
        return RayRankProcess(rank, actor, actor.run.remote(self._module, spec))


def launcher_here(
    size: int, options: dict[str, float | str], placement: Placement, module: str = FOLLOWER
) -> RayRankLauncher | None:
    """Return what starts the followers of this replica; None where its engine has a single rank.

    Raises:
        RuntimeError: several ranks, and this process is in no placement group.
    """
    if size == 1:
        return None
    group = get_current_placement_group()
    if group is None:
        raise RuntimeError(f"an engine of {size} ranks, but this replica is in no placement group")
    return RayRankLauncher(group, options, placement, module)
