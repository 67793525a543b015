"""Owns the decision where a request goes, given what is known of each engine replica.
Never learns anything by itself and never keeps state; the same knowledge and random source give the same decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import attrgetter
from random import Random
from typing import NamedTuple

NUM_DRAWN = 2
"""Replicas drawn at random where nothing speaks for one of them: the power of two choices."""


class Candidate(NamedTuple):
    """A replica as one request sees it. A tuple, because a request sees each of a thousand replicas so."""

    replica_id: str
    load_tokens: int = 0
    """What is to be done there, in prompt tokens to compute."""
    num_cached_tokens: int = 0
    """Leading tokens of this prompt that are computed there."""
    num_free_tokens: int | None = None
    """That its KV cache has room for; None if unknown."""
    adapter_tokens: int = 0
    """What reading the request's adapter counts there, in prompt tokens to compute; 0 where it is or none is needed."""
    full: bool = False
    """It takes no request now."""


_load = attrgetter("load_tokens")


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request wants from its replica."""

    num_tokens: int
    """Of its prompt."""
    session: str | None = None
    avoid: frozenset[str] = frozenset()
    """Replica ids to keep away from while there is another."""

    def num_new_tokens(self, num_cached_tokens: int) -> int:
        """Of the prompt, those to be computed where so many are: the last one always is."""
        return max(self.num_tokens - num_cached_tokens, 1)


@dataclass(frozen=True, slots=True)
class Bound:
    """How much more than the mean a replica may have to do and still be chosen for its cache or its session."""

    load_factor: float
    slack_tokens: int

    def of(self, candidates: Sequence[Candidate]) -> float:
        mean: float = sum(map(_load, candidates)) / len(candidates)
        return self.load_factor * mean + self.slack_tokens


def rank(ask: Ask, candidates: Sequence[Candidate], bound: Bound, random: Random) -> list[list[str]]:
    """Replica ids in the order in which they are to be tried; the first that takes the request gets it.

    1. Replicas to avoid are left out, unless there is no other.
    2. Full ones come last, in one rank, and so are looked at again before the request waits.
    3. Those above the bound come after those within it. Whoever has least to do is always within it.
    4. Those whose KV cache has no room come after those that have it: the request would wait there.
    5. With a session, the order of the session's own hash decides: when a replica goes, only its sessions move.
    6. Without, the fewest tokens before the first answer token decide: what is to be done there already, and what
       is to be computed of this prompt. So a cached prefix counts exactly the tokens that it saves, and an adapter that
       has to be read what that is said to cost: its holders come first while they have little more to do. Replicas that
       have nothing of either are represented by two drawn at random: every ingress replica has the same reports, and
       all would send to the same one until the next.
    """
    if not candidates:
        return []
    allowed = [candidate for candidate in candidates if candidate.replica_id not in ask.avoid] or list(candidates)
    allowed.sort(key=lambda _: random.random())  # the order among equals; a shuffle takes three times as long
    most = bound.of(allowed)
    ready = [candidate for candidate in allowed if not candidate.full]
    light = [candidate for candidate in ready if candidate.load_tokens <= most]
    heavy = sorted((candidate for candidate in ready if candidate.load_tokens > most), key=_load)
    ranks = [[candidate.replica_id] for candidate in [*_in_order(ask, light), *heavy]]
    full = [candidate.replica_id for candidate in allowed if candidate.full]
    return [*ranks, full] if full else ranks


def _in_order(ask: Ask, candidates: list[Candidate]) -> list[Candidate]:
    def cost(candidate: Candidate) -> tuple[bool, int]:
        num_new_tokens = ask.num_new_tokens(candidate.num_cached_tokens)
        to_do = candidate.load_tokens + num_new_tokens + candidate.adapter_tokens
        return _lacks_room(candidate, num_new_tokens), to_do

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
    # All of the prompt is new to each of the rest, and so is its adapter: their loads alone tell which costs less.
    return sorted([*holders, *drawn], key=cost) + [one for group in rest for one in sorted(group, key=_load)]


def _lacks_room(candidate: Candidate, num_tokens: int) -> bool:
    """The cache of the replica has no room for so many more."""
    free = candidate.num_free_tokens
    return free is not None and free < num_tokens


def session_weight(session: str, replica_id: str) -> int:
    """Rendezvous hashing: the replica with the highest weight is the session's home, the next one its second."""
    text = f"{replica_id}\0{session}".encode("utf-8", "surrogatepass")  # a client's JSON may hold half a character
    return int.from_bytes(blake2b(text, digest_size=8).digest())


def two_choices(candidates: Sequence[Candidate], random: Random) -> list[list[str]]:
    """For calls that compute nothing: two drawn at random in one rank, where Serve takes the shorter queue."""
    ready = [candidate.replica_id for candidate in candidates if not candidate.full]
    full = [candidate.replica_id for candidate in candidates if candidate.full]
    random.shuffle(ready)
    return [ranked for ranked in (ready[:NUM_DRAWN], ready[NUM_DRAWN:], full) if ranked]
