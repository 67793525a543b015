"""Owns what is assumed about several prefix caches: which holder has which blocks of which prompts.
Never holds tokens, and is never certain: a wrong assumption costs a recomputed prefix, not a wrong answer."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Container, Sequence

from engine.multimodal_inputs import SpanInput
from engine.prefix import extend_chain, root_of

KEY_BYTES = 8
"""How many bytes of a block's digest are its key. Engines share KV by the whole digest, so a collision of keys only
sends a request to a holder that turns out to lack its prefix."""


def prefix_keys(
    token_ids: Sequence[int],
    block_size: int,
    max_blocks: int,
    salt: str = "",
    inputs: Sequence[SpanInput] = (),
    adapter: str = "",
) -> tuple[bytes, ...]:
    """Compute the keys of a prompt's first full blocks, at most `max_blocks`, as an engine names them. `adapter`: the
    digest of the adapter that computes them."""
    chain: list[bytes] = []
    num_blocks = min(len(token_ids) // block_size, max_blocks)
    extend_chain(chain, token_ids, num_blocks, block_size, root_of(salt, adapter), inputs)
    return tuple(digest[:KEY_BYTES] for digest in chain)


class PrefixIndex:
    """Knows of each holder the blocks that it probably has, and when that was last known. A router's holders are engine
    replicas; those of an engine of several ranks are its ranks.

    Two sources are merged: a request brings its prefix to the holder to which it is sent, and an engine reports what
    it has. The later one counts: blocks that a report lacks are removed, unless they were sent after the report.
    """

    def __init__(self, max_blocks: int) -> None:
        """`max_blocks`: how many blocks are kept for a holder; the least recently known are removed first."""
        self._max_blocks = max_blocks
        self._known: defaultdict[str, OrderedDict[bytes, float]] = defaultdict(OrderedDict)  # key -> seconds

    def num_blocks(self, holder: str) -> int:
        return len(self._known.get(holder, ()))

    def knows(self, holder: str) -> bool:
        """Whether anything was ever noted about the holder, if only that it has nothing."""
        return holder in self._known

    def names(self) -> list[str]:
        return list(self._known)

    def of(self, holder: str) -> Container[bytes]:
        """Return the keys of the holder's blocks."""
        return self._known.get(holder, ())

    def match(self, holder: str, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks of a prompt the holder has."""
        return _depth(self._known.get(holder, {}), keys)

    def holders(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Return the holders that have leading blocks of a prompt, and how many each has. Callable on any thread: it
        looks at a copy of the holders, and at one key at a time."""
        if not keys:
            return {}
        first = keys[0]
        return {holder: _depth(known, keys) for holder, known in list(self._known.items()) if first in known}

    def add(self, holder: str, keys: Sequence[bytes], now: float) -> None:
        """Note that a prompt was sent to the holder at `now`, in seconds."""
        known = self._known[holder]
        _refresh(known, keys, now)
        _trim(known, self._max_blocks)

    def report(self, holder: str, keys: Sequence[bytes], taken_at: float, *, complete: bool, max_cached: int) -> None:
        """Note that the holder's engine had `keys` at `taken_at`, heads of prefixes first, and nothing else if
        `complete`. Otherwise it had at most `max_cached` blocks, so older ones beyond that number are removed.
        """
        known = self._known[holder]
        later = [(key, at) for key, at in known.items() if at > taken_at]
        if complete:
            known.clear()
        _refresh(known, keys, taken_at)
        _trim(known, max(max_cached, len(keys)))
        for key, at in later:
            known[key] = at
            known.move_to_end(key)
        _trim(known, self._max_blocks)

    def forget(self, holder: str) -> None:
        self._known.pop(holder, None)


def _depth(known: Container[bytes], keys: Sequence[bytes]) -> int:
    return next((depth for depth, key in enumerate(keys) if key not in known), len(keys))


def _refresh(known: OrderedDict[bytes, float], keys: Sequence[bytes], at: float) -> None:
    for key in reversed(keys):  # a head must outlive its tail, which is useless without it
        known[key] = at
        known.move_to_end(key)


def _trim(known: OrderedDict[bytes, float], most: int) -> None:
    while len(known) > most:
        known.popitem(last=False)
