"""Owns the KV blocks: which are free, which requests hold them, and which cached prefixes they contain.
Never touches KV memory: it manages block ids, and publishes a block only when told that its KV is computed."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, islice


class BlockManager:
    """Reference-counted blocks with a prefix cache.

    A block is free, held (by one request or, when cached, several), or evictable: not held, but still with a cached
    prefix. Evictable blocks are reused last, the least recently released first.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.epoch = 0
        """Changes whenever a lookup could return something else, so that callers may cache a result until then."""
        self._caching = enable_prefix_caching
        self._holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # popped from the end: lowest ids first
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._cached_and_held: dict[int, None] = {}  # together with the evictable blocks, all with a cached prefix
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now, including evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def freed_by(self, block_ids: Iterable[int], gone: Counter[int]) -> int:
        """Return how many blocks become available if a request releases these after the releases counted in `gone`. A
        shared block is freed only with its last holder. Adds these releases to `gone`."""
        freed = 0
        for block_id in block_ids:
            gone[block_id] += 1
            freed += gone[block_id] == self._holders[block_id]
        return freed

    def is_held(self, block_id: int) -> bool:
        return self._holders[block_id] > 0

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def match(self, hashes: Iterable[bytes]) -> tuple[int, ...]:
        """Return the blocks of the longest cached prefix of a hash chain. Takes no reference."""
        matched: list[int] = []
        for digest in hashes:
            block_id = self._block_of.get(digest)
            if block_id is None:
                break
            matched.append(block_id)
        return tuple(matched)

    def block_of(self, digest: bytes) -> int | None:
        """Return the cached block with a digest; None if there is none."""
        return self._block_of.get(digest)

    def cached_digests(self, limit: int) -> list[bytes]:
        """Return up to `limit` digests of cached blocks: first those in use, then the others, last released first.

        A prefix's head comes before its tail, which is useless without it. The time depends on `limit`, not on the
        number of blocks.
        """
        block_ids = chain(self._cached_and_held, reversed(self._evictable))
        return [self._hash_of[block_id] for block_id in islice(block_ids, limit)]

    def claim(self, block_ids: Sequence[int]) -> None:
        """Hold blocks that `match` returned."""
        for block_id in block_ids:
            assert block_id in self._hash_of, f"claimed block {block_id} is not cached"
            if not self._holders[block_id]:
                del self._evictable[block_id]
                self._cached_and_held[block_id] = None
            self._holders[block_id] += 1

    def share(self, block_ids: Sequence[int]) -> None:
        """Hold blocks that somebody holds already, cached or not."""
        for block_id in block_ids:
            assert self._holders[block_id], f"shared block {block_id} is not held"
            self._holders[block_id] += 1

    def allocate(self, count: int) -> tuple[int, ...]:
        """Hold `count` fresh blocks, evicting cached ones when nothing else is left.

        Admission has reserved them, so running short is a bug.
        """
        assert count <= self.num_available, f"allocating {count} blocks with {self.num_available} available"
        return tuple(self._take_one() for _ in range(count))

    def _take_one(self) -> int:
        block_id = self._free.pop() if self._free else self._evict_one()
        assert not self._holders[block_id], f"block {block_id} was free and held"
        self._holders[block_id] = 1
        return block_id

    def _evict_one(self) -> int:
        block_id, _ = self._evictable.popitem(last=False)
        del self._block_of[self._hash_of.pop(block_id)]
        self.epoch += 1
        return block_id

    def reset_cache(self) -> int:
        """Drop the cached prefixes that no request holds, and return the number of blocks. Held blocks stay: their
        holders may share them and publish the blocks that follow."""
        dropped = len(self._evictable)
        self._free += [self._evict_one() for _ in range(dropped)]
        return dropped

    def publish(self, block_id: int, digest: bytes) -> None:
        """Share a held, fully computed block with later requests. The first block with a digest stays the cached
        one."""
        assert self._holders[block_id], f"published block {block_id} is not held"
        if self._caching and digest not in self._block_of:
            self._block_of[digest] = block_id
            self._hash_of[block_id] = digest
            self._cached_and_held[block_id] = None
            self.epoch += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block. Releasing a block that is not held raises: it would corrupt another
        request."""
        for block_id in reversed(block_ids):  # so that the tail of a prefix is evicted before its head
            if not self._holders[block_id]:
                raise RuntimeError(f"block {block_id} was released twice")
            self._holders[block_id] -= 1
            if not self._holders[block_id]:
                self._retire(block_id)

    def _retire(self, block_id: int) -> None:
        if block_id in self._hash_of:
            del self._cached_and_held[block_id]
            self._evictable[block_id] = None
        else:
            self._free.append(block_id)
