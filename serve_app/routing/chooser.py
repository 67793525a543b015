"""Ranks the replicas for one request by what the router knows about each.
Never learns anything except its own placements: the fleet takes the reports."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from random import Random

from engine.prefix_index import prefix_keys
from engine.protocol import Submission
from serve_app.routing.fleet import Fleet
from serve_app.routing.placement import Ask, Bound, Candidate, rank
from serve_app.routing.stats import adapter_key
from serve_app.routing.tiered_index import NOTHING, Found
from serve_app.settings.routing import RoutingSettings

_NOBODY: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Choice:
    """The ranking of replicas for one request."""

    ranks: list[list[str]]
    """Replica ids; see placement.rank."""
    num_cached_tokens: dict[str, int]
    """How many of the prompt's tokens are expected in each replica's cache or its tiers; replicas with none are left
    out."""


class Chooser:
    """Chooses for one router. The time grows with the number of replicas: one or two milliseconds for a thousand."""

    def __init__(self, routing: RoutingSettings, block_size: int, random: Random) -> None:
        """`block_size`: that of the engines, in tokens."""
        self._routing = routing
        self._block_size = block_size
        self._bound = Bound(routing.load_factor, routing.slack_tokens)
        self._random = random
        self.fleet = Fleet(block_size, routing.index_blocks)

    def place(
        self,
        attempt: str,
        submission: Submission,
        names: Collection[str],
        now: float,
        *,
        session: str | None = None,
        avoid: Iterable[str] = (),
        full: Container[str] = (),
    ) -> Choice:
        """Rank the replicas of these names, and count the request at the first of them, so that requests that are
        placed before it arrives there take it into account.

        `now`: wall clock, in seconds. `full`: the replicas that take no request now. `attempt` must be open in the
        fleet.
        """
        prompt = submission.prompt_token_ids
        keys = self._keys(submission)
        cached = self.fleet.holders(keys)
        ask = Ask(len(prompt), session, frozenset(avoid), 1 - self._routing.tier_hit_weight)
        needs = b"" if submission.adapter is None else adapter_key(submission.adapter.digest)
        lack = {name for name in names if not self.fleet.holds_adapter(name, needs)} if needs else _NOBODY
        candidates = self._candidates(names, now, cached, lack, full)
        ranks = rank(ask, candidates, self._bound, self._random)
        if ranks:
            first = ranks[0][0]
            found = cached.get(first, NOTHING)
            num_new_tokens = ask.num_new_tokens(found.num_cached)
            found = found._replace(num_cached=len(prompt) - num_new_tokens)
            self.fleet.place(attempt, first, num_new_tokens, keys, now, needs, cached=found)
        return Choice(ranks, {name: found.num_cached for name, found in cached.items()})

    def most_cached(self, submission: Submission) -> dict[str, int]:
        """Return how many leading tokens of a prompt each replica may have in its cache or its tiers; those with none
        are left out. Only the first blocks are looked up, so a replica with all of these may have the whole prompt.
        Callable on any thread."""
        keys = self._keys(submission)
        whole = self._block_size * len(keys) if len(keys) == self._routing.prefix_blocks else None
        num_tokens = len(submission.prompt_token_ids)
        return {
            name: num_tokens if found.num_cached == whole else found.num_cached
            for name, found in self.fleet.holders(keys).items()
        }

    def _keys(self, submission: Submission) -> tuple[bytes, ...]:
        adapter = "" if submission.adapter is None else submission.adapter.digest
        return prefix_keys(
            submission.prompt_token_ids,
            self._block_size,
            self._routing.prefix_blocks,
            submission.cache_salt,
            submission.inputs,
            adapter,
        )

    def _candidates(
        self,
        names: Collection[str],
        now: float,
        cached: Mapping[str, Found],
        lack: Collection[str],
        full: Container[str],
    ) -> list[Candidate]:
        """Describe the replicas by time, or by tokens if one of them predicts none. `cached`: the prompt's tokens in
        their caches; `lack`: those that would have to load its adapter."""
        weight, to_load = self._routing.request_tokens, self._routing.adapter_tokens
        found = [cached.get(name, NOTHING) for name in names]
        predicted = self.fleet.predicted_loads(names, now)
        if predicted is not None:
            return [
                Candidate(
                    name,
                    queued_s + token_s * weight * num_requests,
                    num_cached,
                    num_loaded,
                    num_free_tokens,
                    to_load if name in lack else 0,
                    name in full,
                    token_s,
                    pair_s,
                )
                for name, (num_cached, num_loaded), (num_requests, queued_s, token_s, pair_s, num_free_tokens) in zip(
                    names, found, predicted, strict=True
                )
            ]
        return [
            Candidate(
                name,
                num_queued_tokens + weight * num_requests,
                num_cached,
                num_loaded,
                num_free_tokens,
                to_load if name in lack else 0,
                name in full,
            )
            for name, (num_cached, num_loaded), (num_requests, num_queued_tokens, num_free_tokens) in zip(
                names, found, self.fleet.loads(names, now), strict=True
            )
        ]
