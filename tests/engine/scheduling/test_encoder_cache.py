"""Contracts of the cache of encoded inputs: contents that are held stay, others go by age,
and each loss is reported once."""

from __future__ import annotations

import pytest

from engine.scheduling.encoder_cache import EncodedInputs, EncoderCache
from engine.step import StepPlan

A, B, C = b"a", b"b", b"c"


def kept(cache: EncoderCache) -> set[bytes]:
    return {digest for digest in (A, B, C) if digest in cache}


def test_a_held_content_outlives_younger_ones_that_nobody_holds() -> None:
    cache = EncoderCache(20)
    cache.hold(A, "r")
    assert cache.use(A, 12)
    assert cache.use(B, 4)
    assert cache.use(C, 8)
    assert (kept(cache), cache.num_tokens) == ({A, C}, 20)
    assert cache.take_dropped() == (B,)
    assert cache.take_dropped() == ()


def test_a_content_is_held_until_the_last_request_lets_go() -> None:
    cache = EncoderCache(10)
    for name in ("r", "s"):
        cache.hold(A, name)
        cache.hold(A, name)
    cache.use(A, 10)
    cache.let_go(A, "r")
    assert not cache.has_room({B: 1}, gone=())
    cache.let_go(A, "s")
    cache.let_go(A, "s")
    assert cache.has_room({B: 10}, gone=())
    assert cache.num_held == 0


def test_requests_that_a_plan_preempts_hold_nothing_in_it() -> None:
    """Otherwise a plan that preempts the holders of the room would still find
    none for the request that it preempts them for."""
    cache = EncoderCache(10)
    cache.hold(A, "r")
    cache.use(A, 10)
    assert not cache.has_room({B: 5}, gone=["s"])
    assert cache.has_room({B: 5}, gone=["s", "r"])


@pytest.mark.parametrize(("size", "fits"), [(3, True), (4, False)])
def test_what_is_needed_counts_once_however_it_is_kept(size: int, fits: bool) -> None:
    cache = EncoderCache(10)
    cache.hold(A, "r")
    cache.use(A, 7)
    assert cache.has_room({A: 7, B: size}, gone=()) is fits


def test_a_lost_content_is_dropped_even_if_it_is_encoded_again_at_once() -> None:
    cache = EncoderCache(10)
    cache.use(A, 7)
    cache.lose([A, A])
    assert (kept(cache), cache.num_tokens) == (set(), 0)
    assert cache.use(A, 7)
    assert cache.take_dropped() == (A,)


def test_what_a_failed_step_should_have_dropped_is_dropped_by_the_next_unless_it_is_kept_again() -> None:
    """Its embeddings stayed in the executor for good."""
    cache = EncoderCache(10)
    for digest in (A, B, C):
        cache.use(digest, 10)
    assert cache.take_dropped() == (A, B)
    cache.use(B, 10)
    assert cache.take_dropped() == (C,)
    cache.drop_again((A, B))
    assert cache.take_dropped() == (A,)


def test_a_step_that_is_lost_names_its_drops_to_the_next() -> None:
    inputs = EncodedInputs(10, 10)
    inputs.lose(StepPlan(0, (), dropped=(A,)))
    assert inputs.cache.take_dropped() == (A,)
