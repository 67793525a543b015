"""Owns the KV blocks: which are free, who holds them, and which cached prefixes they carry.
Never touches KV memory; it deals in block ids, and publishes a block only when told that its KV is computed."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, islice


class BlockManager:
    """Reference-counted blocks with a prefix cache.

    A block is free, held (by one request or, when cached, several), or evictable: held by nobody but still carrying
    a cached prefix. Evictable blocks are reused last, least recently released first.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.epoch = 0
        """Changes whenever a lookup could answer differently, so that callers may keep an answer until then."""
        self._caching = enable_prefix_caching
        self._holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # popped from the end: lowest ids first
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._cached_and_held: dict[int, None] = {}  # with the evictable ones, all that carry a cached prefix
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now, evictable ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def freed_by(self, block_ids: Iterable[int], gone: Counter[int]) -> int:
        """How many blocks become available if a request releases these after others did: shared ones only with all
        holders. `gone` counts the releases so far, and then these too."""
        freed = 0
        for block_id in block_ids:
            gone[block_id] += 1
            freed += gone[block_id] == self._holders[block_id]
        return freed

    def is_held(self, block_id: int) -> bool:
        return self._holders[block_id] > 0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def match(self, hashes: Iterable[bytes]) -> tuple[int, ...]:
        """Blocks of the longest cached prefix of a hash chain. Takes no reference."""
        matched: list[int] = []
        for digest in hashes:
            block_id = self._block_of.get(digest)
            if block_id is None:
                break
            matched.append(block_id)
        return tuple(matched)

    def cached_digests(self, limit: int) -> list[bytes]:
        """Up to `limit` digests of cached blocks: of those in use, then of the others, last released first.

        A prefix's head comes before its tail, which is of no use without it. Costs time for `limit` blocks, not all.
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

    def allocate(self, count: int) -> tuple[int, ...]:
        """Hold `count` fresh blocks, evicting cached ones when nothing else is left.

        Admission promised them, so running short is a bug of ours.
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
        """Forget the cached prefixes that nobody holds; how many blocks that were. Held ones stay: their holders may
        share them, and publish what follows."""
        dropped = len(self._evictable)
        self._free += [self._evict_one() for _ in range(dropped)]
        return dropped

    def publish(self, block_id: int, digest: bytes) -> None:
        """Offer a held, fully computed block to later requests. The first block with a digest stays the cached one."""
        assert self._holders[block_id], f"published block {block_id} is not held"
        if self._caching and digest not in self._block_of:
            self._block_of[digest] = block_id
            self._hash_of[block_id] = digest
            self._cached_and_held[block_id] = None
            self.epoch += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Give up one reference to each block. Releasing what is not held raises: it would corrupt a neighbour."""
        for block_id in reversed(block_ids):  # the tail of a prefix becomes evictable, and so is evicted, first
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
