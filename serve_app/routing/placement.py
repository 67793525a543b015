"""Decides where a request goes, given what is known about each engine replica.
Never keeps state: the same knowledge and random source give the same decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import attrgetter
from random import Random
from typing import NamedTuple

from engine.protocol import num_pairs

NUM_DRAWN = 2
"""How many replicas are drawn at random if no cache or session speaks for one: the power of two choices."""


class Candidate(NamedTuple):
    """A replica from one request's point of view. A tuple, because a request may make a thousand of them.

    Work is in seconds if all candidates predict them, and else in prompt tokens to compute.
    """

    replica_id: str
    load: float = 0.0
    """The replica's pending work."""
    num_cached_tokens: int = 0
    """Leading tokens of this prompt in the replica's cache, or in a tier below it."""
    num_loaded_tokens: int = 0
    """The part of these that is only in a tier, so that it has to be loaded."""
    num_free_tokens: int | None = None
    """Tokens for which the KV cache has room; None if unknown."""
    adapter_tokens: int = 0
    """The cost of loading the request's adapter, in prompt tokens to compute; 0 if it is loaded or not needed."""
    full: bool = False
    """Whether the replica takes no request now."""
    token_cost: float = 1.0
    """The work of a prompt token."""
    pair_cost: float = 0.0
    """The work of a pair of a token and a position that it attends to."""


_load = attrgetter("load")
_token_cost = attrgetter("token_cost")


@dataclass(frozen=True, slots=True)
class Ask:
    """What matters about a request for its placement."""

    num_tokens: int
    """The length of the prompt."""
    session: str | None = None
    avoid: frozenset[str] = frozenset()
    """The ids of replicas to avoid as long as there is another."""
    load_cost: float = 0.0
    """What it costs to load a token from a tier, as a share of computing it."""

    def num_new_tokens(self, num_cached_tokens: int) -> int:
        """Return how many of the prompt's tokens must be computed if so many are cached; at least the last one."""
        return max(self.num_tokens - num_cached_tokens, 1)


@dataclass(frozen=True, slots=True)
class Bound:
    """Limits by how much a replica's load may exceed the mean if it is chosen for its cache or its session."""

    load_factor: float
    slack_tokens: int

    def load_limit(self, candidates: Sequence[Candidate]) -> float:
        load: float = sum(map(_load, candidates))
        slack: float = self.slack_tokens * sum(map(_token_cost, candidates))
        return (self.load_factor * load + slack) / len(candidates)


def rank(ask: Ask, candidates: Sequence[Candidate], bound: Bound, random: Random) -> list[list[str]]:
    """Return replica ids in the order in which to try them; the first that takes the request gets it.

    1. Replicas to avoid are left out, unless there is no other.
    2. Full replicas come last, in one rank, so that they are checked again before the request waits.
    3. Replicas above the bound come after those within it. The least loaded one is always within it.
    4. Replicas with no room in their KV cache come after those that have room, because the request would wait there.
    5. With a session, the session's hash decides the order, so that only its sessions move when a replica goes.
    6. Without a session, the least work before the first answer token decides: the replica's pending work, and what
       must be computed of this prompt. In seconds, that is the predicted time to the first token, so that engines get
       work in proportion to their speed. A cached prefix counts exactly what it saves, less a configured share for what
       must be loaded from a tier. Where engines share a disk, all of them have that, and their loads decide. An adapter
       that must be loaded counts its configured cost: replicas that have it come first as long as they have little more
       to do. Of
       replicas that have neither, two drawn at random come first: all ingress replicas have the same reports,
       and would otherwise all send to the same replica until the next report.
    """
    if not candidates:
        return []
    allowed = [candidate for candidate in candidates if candidate.replica_id not in ask.avoid] or list(candidates)
    allowed.sort(key=lambda _: random.random())  # the order among equals; a shuffle takes three times as long
    most = bound.load_limit(allowed)
    ready = [candidate for candidate in allowed if not candidate.full]
    light = [candidate for candidate in ready if candidate.load <= most]
    heavy = sorted((candidate for candidate in ready if candidate.load > most), key=_load)
    ranks = [[candidate.replica_id] for candidate in [*_in_order(ask, light), *heavy]]
    full = [candidate.replica_id for candidate in allowed if candidate.full]
    return [*ranks, full] if full else ranks


def _in_order(ask: Ask, candidates: list[Candidate]) -> list[Candidate]:
    def cost(candidate: Candidate) -> tuple[bool, float]:
        num_new_tokens, num_loaded_tokens = ask.num_new_tokens(candidate.num_cached_tokens), candidate.num_loaded_tokens
        work = _work(candidate, ask.num_tokens - num_new_tokens, ask.num_tokens)
        if num_loaded_tokens:
            end = candidate.num_cached_tokens
            work += ask.load_cost * _work(candidate, end - num_loaded_tokens, end)
        lacks_room = _lacks_room(candidate, num_new_tokens + num_loaded_tokens)
        return lacks_room, candidate.load + work + candidate.token_cost * candidate.adapter_tokens

    if (session := ask.session) is not None:
        return sorted(candidates, key=lambda one: (cost(one)[0], -session_weight(session, one.replica_id)))
    dearest = max((candidate.adapter_tokens for candidate in candidates), default=0)
    holders = [one for one in candidates if one.num_cached_tokens or one.adapter_tokens < dearest]
    others = [one for one in candidates if not one.num_cached_tokens and one.adapter_tokens == dearest]
    everything = ask.num_new_tokens(0)
    roomy = [candidate for candidate in others if not _lacks_room(candidate, everything)]
    tight = [candidate for candidate in others if _lacks_room(candidate, everything)]
    drawn = [*roomy[:NUM_DRAWN], *tight][:NUM_DRAWN]
    rest = [roomy[NUM_DRAWN:], tight[max(NUM_DRAWN - len(roomy), 0) :]]
    # The rest have neither the prompt nor its adapter, so their loads tell them apart well enough.
    return sorted([*holders, *drawn], key=cost) + [one for group in rest for one in sorted(group, key=_load)]


def _work(candidate: Candidate, start: int, end: int) -> float:
    """Return what it takes to compute the positions [start, end) of a prompt."""
    return candidate.token_cost * (end - start) + candidate.pair_cost * num_pairs(start, end)


def _lacks_room(candidate: Candidate, num_tokens: int) -> bool:
    """Whether the replica's cache has no room for `num_tokens` more."""
    free = candidate.num_free_tokens
    return free is not None and free < num_tokens


def session_weight(session: str, replica_id: str) -> int:
    """Rate a replica for a session by rendezvous hashing: the one with the highest weight is the session's first
    choice.
    """
    text = f"{replica_id}\0{session}".encode("utf-8", "surrogatepass")  # a client's JSON may have half a surrogate pair
    return int.from_bytes(blake2b(text, digest_size=8).digest())


def two_choices(candidates: Sequence[Candidate], random: Random) -> list[list[str]]:
    """Rank replicas for a call that computes nothing: two drawn at random form the first rank, and Serve takes the one
    with the shorter queue."""
    ready = [candidate.replica_id for candidate in candidates if not candidate.full]
    full = [candidate.replica_id for candidate in candidates if candidate.full]
    random.shuffle(ready)
    return [ranked for ranked in (ready[:NUM_DRAWN], ready[NUM_DRAWN:], full) if ranked]
