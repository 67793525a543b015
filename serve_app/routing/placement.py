"""Owns the decision where a request goes, given what is known of each engine replica.
Never learns anything by itself and never keeps state; the same knowledge and random source give the same decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

NUM_DRAWN = 2
"""Replicas drawn at random where nothing speaks for one of them: the power of two choices."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as one request sees it."""

    replica_id: str
    load_tokens: int = 0
    """What is to be done there, in prompt tokens to compute."""
    num_cached_tokens: int = 0
    """Leading tokens of this prompt that are computed there."""
    num_free_tokens: int | None = None
    """That its KV cache has room for; None if unknown."""
    full: bool = False
    """It takes no request now."""

    def num_new_tokens(self, num_tokens: int) -> int:
        """Of a prompt of `num_tokens`, those to be computed here: the last one always is."""
        return max(num_tokens - self.num_cached_tokens, 1)


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request wants from its replica."""

    num_tokens: int
    """Of its prompt."""
    session: str | None = None
    avoid: frozenset[str] = frozenset()
    """Replica ids to keep away from while there is another."""


@dataclass(frozen=True, slots=True)
class Bound:
    """How much more than the mean a replica may have to do and still be chosen for its cache or its session."""

    load_factor: float
    slack_tokens: int

    def of(self, candidates: Sequence[Candidate]) -> float:
        mean = sum(candidate.load_tokens for candidate in candidates) / len(candidates)
        return self.load_factor * mean + self.slack_tokens


def rank(ask: Ask, candidates: Sequence[Candidate], bound: Bound, random: Random) -> list[list[str]]:
    """Replica ids in the order in which they are to be tried; the first that takes the request gets it.

    1. Replicas to avoid are left out, unless there is no other.
    2. Full ones come last, in one rank, and so are looked at again before the request waits.
    3. Those above the bound come after those within it. Whoever has least to do is always within it.
    4. Those whose KV cache has no room come after those that have it: the request would wait there.
    5. With a session, the order of the session's own hash decides: when a replica goes, only its sessions move.
    6. Without, the fewest tokens before the first answer token decide: what is to be done there already, and what
       is to be computed of this prompt. So a cached prefix counts exactly the tokens that it saves. Replicas that have
       none of it are represented by two drawn at random: every ingress replica has the same reports, and all would
       send to the same one until the next.
    """
    if not candidates:
        return []
    allowed = [candidate for candidate in candidates if candidate.replica_id not in ask.avoid] or list(candidates)
    random.shuffle(allowed)  # the order among equals
    most = bound.of(allowed)
    ready = [candidate for candidate in allowed if not candidate.full]
    light = [candidate for candidate in ready if candidate.load_tokens <= most]
    heavy = sorted((candidate for candidate in ready if candidate.load_tokens > most), key=lambda one: one.load_tokens)
    full = [candidate.replica_id for candidate in allowed if candidate.full]
    ranks = [[candidate.replica_id] for candidate in [*_in_order(ask, light), *heavy]]
    return [*ranks, full] if full else ranks


def _in_order(ask: Ask, candidates: list[Candidate]) -> list[Candidate]:
    def has_no_room(candidate: Candidate) -> bool:
        free = candidate.num_free_tokens
        return free is not None and free < candidate.num_new_tokens(ask.num_tokens)

    def cost(candidate: Candidate) -> tuple[bool, int]:
        return has_no_room(candidate), candidate.load_tokens + candidate.num_new_tokens(ask.num_tokens)

    if (session := ask.session) is not None:
        return sorted(candidates, key=lambda one: (has_no_room(one), -session_weight(session, one.replica_id)))
    holders = [candidate for candidate in candidates if candidate.num_cached_tokens]
    others = sorted((candidate for candidate in candidates if not candidate.num_cached_tokens), key=has_no_room)
    return sorted(holders + others[:NUM_DRAWN], key=cost) + sorted(others[NUM_DRAWN:], key=cost)


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
