"""Owns which rank gets a request: the one that has least to compute before its first token, cached prefixes counted.
Never asks a rank what it has cached: it knows what each was sent, and a wrong guess costs a prefix, never an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.config import ResolvedConfig
from engine.prefix_index import PrefixIndex, prefix_keys
from engine.protocol import Submission

REQUEST_TOKENS = 64
"""What a request weighs besides its prompt, in prompt tokens to compute; as `routing.request_tokens` by default."""
LOAD_FACTOR = 1.25
SLACK_TOKENS = 8 * REQUEST_TOKENS
"""A rank whose load exceeds the least times the factor by more than this gets a request only after the others, whatever
it has cached. All ranks make their steps together, so that one with many rows slows the others' answers, too."""


@dataclass(slots=True)
class _Given:
    """A request that has not ended."""

    rank: int
    num_tokens: int
    """What its rank must compute before its first token; 0 once there is one."""


class Places:
    """The requests of ranks that have their own KV. Methods that change it are for one thread at a time."""

    def __init__(self, size: int, config: ResolvedConfig) -> None:
        """config: of each of the `size` ranks."""
        self._seats = config.max_num_seqs
        self._most = config.max_num_seqs + config.max_queued_requests
        self._block_size = config.block_size
        self._max_blocks = config.num_kv_blocks if config.enable_prefix_caching else 0
        self._index = PrefixIndex(self._max_blocks)
        self._given: dict[str, _Given] = {}
        self._counts, self._tokens = [0] * size, [0] * size

    @property
    def counts(self) -> Sequence[int]:
        """How many requests each rank has that have not ended. Any thread. # [size]"""
        return tuple(self._counts)

    def rank_of(self, request_id: str) -> int | None:
        """Return the rank of a request; None once it has ended. Any thread."""
        given = self._given.get(request_id)
        return None if given is None else given.rank

    def keys(self, submission: Submission) -> tuple[bytes, ...]:
        """Return the names of a prompt's blocks, for `place`: milliseconds for a long one. Any thread."""
        adapter = "" if submission.adapter is None else submission.adapter.digest
        how = submission.cache_salt, submission.inputs, adapter
        return prefix_keys(submission.prompt_token_ids, self._block_size, self._max_blocks, *how)

    def place(self, submission: Submission, keys: Sequence[bytes]) -> int:
        """Choose a request's rank, and count it there."""
        cached = {int(rank): depth * self._block_size for rank, depth in self._index.holders(keys).items()}
        rank = self._choose(submission, cached)
        num_tokens = _num_new(submission, cached.get(rank, 0))
        self._given[submission.request_id] = _Given(rank, num_tokens)
        self._counts[rank] += 1
        self._tokens[rank] += num_tokens
        self._index.add(str(rank), keys, 0.0)
        return rank

    def _choose(self, submission: Submission, cached: Mapping[int, int]) -> int:
        """cached: by rank, how many of the prompt's tokens it has."""
        loads = [tokens + REQUEST_TOKENS * count for tokens, count in zip(self._tokens, self._counts, strict=True)]
        limit = LOAD_FACTOR * min(loads) + SLACK_TOKENS

        def order(rank: int) -> tuple[bool, bool, bool, int, int, int]:
            load, count = loads[rank], self._counts[rank]
            work = load + _num_new(submission, cached.get(rank, 0))
            # One that is full would refuse it, and one without a free seat let it wait.
            return count >= self._most, count >= self._seats, load > limit, work, count, rank

        return min(range(len(loads)), key=order)

    def began(self, request_id: str) -> None:
        """Note that a request has had its first token; again has no effect."""
        given = self._given.get(request_id)
        if given is not None and given.num_tokens:
            self._tokens[given.rank] -= given.num_tokens
            given.num_tokens = 0

    def ended(self, request_id: str) -> None:
        """Note that a request has ended; again has no effect."""
        self.began(request_id)
        if (given := self._given.pop(request_id, None)) is not None:
            self._counts[given.rank] -= 1

    def forget_prefixes(self) -> None:
        """No rank has any prefix."""
        self._index = PrefixIndex(self._max_blocks)


def _num_new(submission: Submission, num_cached: int) -> int:
    """Return how many of a prompt's tokens are computed; the last one always is."""
    return max(len(submission.prompt_token_ids) - num_cached, 1)
