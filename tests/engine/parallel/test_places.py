"""Contracts of a request's place among ranks with KV of their own: prefixes draw it, and no rank is overloaded for one.
Never starts a rank: an engine's tests do (tests/engine/lockstep/test_processes.py)."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.parallel.places import LOAD_FACTOR, REQUEST_TOKENS, SLACK_TOKENS, Places
from engine.protocol import SamplingParams, Submission
from tests.support.engines import resolved_config

LONG = tuple(range(4096))
PARAMS = SamplingParams(max_tokens=8)


def places(size: int = 2, **settings: int | bool) -> Places:
    return Places(size, resolved_config(**{"max_num_seqs": 64, "num_kv_blocks": 4096} | settings))


def place(found: Places, name: str, prompt: tuple[int, ...], salt: str = "") -> int:
    submission = Submission(name, prompt, PARAMS, cache_salt=salt)
    return found.place(submission, found.keys(submission))


def run(found: Places, name: str, prompt: tuple[int, ...], salt: str = "") -> int:
    """Place a request that ends at once."""
    rank = place(found, name, prompt, salt)
    found.ended(name)
    return rank


def test_without_prefixes_the_rank_with_the_fewest_gets_a_request_and_of_equals_the_first() -> None:
    found = places(3)
    prompts = [tuple(range(1000 * n, 1000 * n + 40)) for n in range(6)]
    assert [place(found, str(n), prompt) for n, prompt in enumerate(prompts)] == [0, 1, 2, 0, 1, 2]
    found.ended("4")
    assert place(found, "6", (1,)) == 1
    assert found.counts == (2, 2, 2)


def test_a_rank_that_computes_a_long_prompt_gets_none_until_its_first_token() -> None:
    found = places()
    assert place(found, "long", LONG) == 0
    others = [place(found, str(n), (n,)) for n in range(4)]
    assert others == [1] * 4
    found.began("long")
    found.began("long")
    assert place(found, "next", (9,)) == 0


def test_the_rank_with_the_longest_prefix_gets_a_prompt_also_if_it_has_a_few_more_requests() -> None:
    found = places()
    assert [place(found, "first", LONG), place(found, "second", LONG[:64])] == [0, 1]
    found.ended("first")
    found.ended("second")
    for turn in range(4):
        assert place(found, f"turn {turn}", (*LONG, turn)) == 0
        found.began(f"turn {turn}")
    assert place(found, "short", (*LONG[:64], 5)) == 1, "where both have it, the load decides"


@pytest.mark.parametrize("salts", [("", "mine"), ("mine", "yours")])
def test_a_prefix_of_another_salt_draws_nobody(salts: tuple[str, str]) -> None:
    found = places()
    assert run(found, "first", LONG, salts[0]) == 0
    assert place(found, "busy", (1, 2, 3)) == 0
    assert place(found, "other", LONG, salts[1]) == 1
    assert place(found, "same", LONG, salts[0]) == 0


def test_a_hot_prefix_fills_no_rank_while_others_are_idle() -> None:
    """All ranks wait for the one with the most rows."""
    found = places(4)
    assert run(found, "first", LONG) == 0
    most = 0
    for n in range(64):
        place(found, str(n), (*LONG, n))
        found.began(str(n))
        loads = [REQUEST_TOKENS * count for count in found.counts]
        most = max(most, max(loads) - min(loads))
        assert max(loads) <= LOAD_FACTOR * min(loads) + SLACK_TOKENS + REQUEST_TOKENS
    assert found.counts == (16,) * 4, "the others have the prefix, too, once they have computed it"
    assert most >= 4 * REQUEST_TOKENS, "but not for a request or two"


def test_a_rank_without_a_free_seat_gets_none_while_another_has_one_and_a_full_one_never() -> None:
    """A request that a rank refuses has failed, though the engine has room."""
    found = places(max_num_seqs=3, max_queued_requests=2)
    assert run(found, "first", LONG) == 0
    ranks = []
    for n in range(10):
        ranks.append(place(found, str(n), (*LONG, n)))
        found.began(str(n))
    assert Counter(ranks[:6]) == {0: 3, 1: 3}
    assert Counter(ranks) == {0: 5, 1: 5}


def test_without_prefix_caching_and_after_a_reset_no_prefix_draws() -> None:
    found = places(enable_prefix_caching=False)
    run(found, "first", LONG)
    place(found, "busy", (1,))
    assert place(found, "again", LONG) == 1
    found = places()
    run(found, "first", LONG)
    place(found, "busy", (1,))
    found.forget_prefixes()
    assert place(found, "again", LONG) == 1


def test_what_has_ended_is_counted_no_more_however_often_that_is_said() -> None:
    found = places()
    place(found, "a", LONG)
    for _ in range(2):
        found.ended("a")
        found.began("a")
    assert (found.counts, found.rank_of("a")) == ((0, 0), None)
    assert place(found, "b", (1,)) == 0
