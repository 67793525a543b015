"""Contracts of the block manager."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.prefix import extend_chain, hash_block
from engine.scheduling.block_manager import BlockManager


def chain(tokens: list[int], block_size: int) -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, tokens, len(tokens) // block_size, block_size)
    return hashes


def test_releasing_twice_raises_and_names_the_block() -> None:
    blocks = BlockManager(4, 4)
    held = blocks.allocate(1)
    blocks.release(held)
    with pytest.raises(RuntimeError, match=f"block {held[0]} was released twice"):
        blocks.release(held)


def test_a_block_is_found_only_after_it_is_published() -> None:
    blocks = BlockManager(4, 4)
    (digest,) = chain([1, 2, 3, 4], 4)
    (block,) = blocks.allocate(1)
    assert blocks.match([digest]) == ()
    blocks.publish(block, digest)
    assert blocks.match([digest]) == (block,)


def test_a_match_stops_at_the_first_block_that_is_missing() -> None:
    blocks = BlockManager(4, 2)
    hashes = chain([1, 2, 3, 4, 5, 6], 2)
    held = blocks.allocate(3)
    blocks.publish(held[0], hashes[0])
    blocks.publish(held[2], hashes[2])
    assert blocks.match(hashes) == (held[0],)


def test_equal_tokens_after_a_different_prefix_hash_differently() -> None:
    assert chain([1, 2, 9, 9], 2)[1] != chain([3, 4, 9, 9], 2)[1]


def test_a_salt_keeps_equal_prompts_apart() -> None:
    assert hash_block(b"tenant a", [1, 2]) != hash_block(b"tenant b", [1, 2])


def test_a_cached_block_survives_release_until_memory_is_needed() -> None:
    blocks = BlockManager(2, 2)
    (digest,) = chain([1, 2], 2)
    held = blocks.allocate(1)
    blocks.publish(held[0], digest)
    blocks.release(held)
    assert (blocks.num_held, blocks.num_evictable, blocks.num_available) == (0, 1, 2)
    blocks.allocate(1)
    assert blocks.match([digest]) == held, "a free block is preferred over an evictable one"
    blocks.allocate(1)
    assert blocks.match([digest]) == ()


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    blocks = BlockManager(3, 2)
    hashes = chain([1, 2, 3, 4, 5, 6], 2)
    held = blocks.allocate(3)
    for block, digest in zip(held, hashes, strict=True):
        blocks.publish(block, digest)
    blocks.release(held)
    blocks.allocate(1)
    assert blocks.match(hashes) == held[:2]


def test_the_least_recently_released_prefix_is_evicted_first() -> None:
    blocks = BlockManager(2, 2)
    old, new = chain([1, 2], 2) + chain([3, 4], 2)
    held = blocks.allocate(2)
    blocks.publish(held[0], old)
    blocks.publish(held[1], new)
    blocks.release(held[:1])
    blocks.release(held[1:])
    blocks.allocate(1)
    assert (blocks.match([old]), blocks.match([new])) == ((), held[1:])


def test_a_shared_block_is_held_until_its_last_holder_releases_it() -> None:
    blocks = BlockManager(2, 2)
    (digest,) = chain([1, 2], 2)
    held = blocks.allocate(1)
    blocks.publish(held[0], digest)
    blocks.claim(held)
    blocks.release(held)
    assert blocks.is_held(held[0])
    blocks.release(held)
    assert not blocks.is_held(held[0])


def test_without_prefix_caching_nothing_is_ever_matched() -> None:
    blocks = BlockManager(2, 2, enable_prefix_caching=False)
    (digest,) = chain([1, 2], 2)
    held = blocks.allocate(1)
    blocks.publish(held[0], digest)
    assert blocks.match([digest]) == ()


def test_a_reset_forgets_what_nobody_holds_and_keeps_what_somebody_does() -> None:
    blocks = BlockManager(4, 2)
    hashes = chain([1, 2, 3, 4], 2)
    held = blocks.allocate(2)
    for block, digest in zip(held, hashes, strict=True):
        blocks.publish(block, digest)
    blocks.claim(held[:1])
    blocks.release(held)
    before = blocks.epoch
    assert blocks.reset_cache() == 1
    assert blocks.epoch != before, "answers kept from before the reset are wrong"
    assert blocks.match(hashes) == held[:1]
    assert (blocks.num_held, blocks.num_evictable, blocks.num_available) == (1, 0, 3)
    assert blocks.reset_cache() == 0


class BlockManagerMachine(RuleBasedStateMachine):
    """Random holders, prefixes and releases, compared with a model that counts by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(12, 2)
        self.holders: list[tuple[int, ...]] = []
        self.hashes = chain(list(range(24)), 2)

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        if count <= self.blocks.num_available:
            fresh = self.blocks.allocate(count)
            assert not set(fresh) & {b for held in self.holders for b in held}, "a held block was handed out"
            self.holders.append(fresh)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), depth=st.integers(0, 11))
    def publish(self, data: st.DataObject, depth: int) -> None:
        held = data.draw(st.sampled_from(self.holders))
        if held and held[0] not in self.blocks._hash_of:
            self.blocks.publish(held[0], self.hashes[depth])

    @rule()
    def claim(self) -> None:
        matched = self.blocks.match(self.hashes)
        self.blocks.claim(matched)
        self.holders.append(matched)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.blocks.release(self.holders.pop(index))

    @rule()
    def reset(self) -> None:
        dropped, evictable = self.blocks.reset_cache(), self.blocks.num_evictable
        assert evictable == 0
        assert dropped <= self.blocks.num_available

    @invariant()
    def blocks_are_conserved(self) -> None:
        held = {b for blocks in self.holders for b in blocks}
        assert self.blocks.num_held == len(held)
        assert self.blocks.num_held + self.blocks.num_available == 12
        for block in range(12):
            assert self.blocks._holders[block] == sum(blocks.count(block) for blocks in self.holders)

    @invariant()
    def what_is_matched_was_published_and_is_unique(self) -> None:
        matched = self.blocks.match(self.hashes)
        assert len(set(matched)) == len(matched)
        assert [self.blocks._hash_of[b] for b in matched] == self.hashes[: len(matched)]


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
