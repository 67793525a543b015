"""Contracts of the prefix index and of the keys that it shares with the engines."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.core import EngineCore
from engine.multimodal_inputs import InputKind, SpanInput
from engine.prefix_index import KEY_BYTES, PrefixIndex, prefix_keys
from engine.protocol import AdapterRef
from tests.support.engines import RecordingCore

PROMPT = tuple(range(1, 19))  # 4 blocks of 4 tokens, and 2 tokens


def engine_keys(core: EngineCore, limit: int = 100) -> list[bytes]:
    return [digest[:KEY_BYTES] for digest in core.cached_digests(limit)]


@pytest.mark.parametrize("adapter", [None, AdapterRef("a", "/a", "0f")])
@pytest.mark.parametrize("salt", ["", "mine"])
def test_a_router_names_the_blocks_of_a_prompt_as_the_engine_that_computed_them_does(
    salt: str, adapter: AdapterRef | None
) -> None:
    """This fails when only one side changes its digest, its chain's root or its block size."""
    core = RecordingCore(block_size=4)
    core.send("r", PROMPT, max_tokens=1, ignore_eos=True, cache_salt=salt, adapter=adapter)
    core.run()
    digest = "" if adapter is None else adapter.digest
    assert set(prefix_keys(PROMPT, 4, 100, salt, adapter=digest)) == set(engine_keys(core))
    assert not set(prefix_keys(PROMPT, 4, 100, salt, adapter="f0")) & set(engine_keys(core))


@pytest.mark.parametrize("salt", ["", "mine"])
def test_a_router_names_blocks_with_images_as_the_engine_does(salt: str) -> None:
    kind = InputKind(name="image", token_id=31, side=1, min_pixels=1, max_pixels=99, chunkable=False)
    core = RecordingCore(block_size=4, inputs=(kind,), encoder_cache_tokens=99)
    prompt = (1, 2, 3, *(31,) * 6, 4, 5, 6, 7)
    for name, data in (("a", bytes(18)), ("b", bytes(range(18)))):
        image = SpanInput.of("image", 3, (1, 2, 3), data)
        core.send(name, prompt, max_tokens=1, ignore_eos=True, cache_salt=salt, inputs=(image,))
        core.run()
        keys = prefix_keys(prompt, 4, 100, salt, (image,))
        assert len(keys) == 3
        assert set(keys) <= set(engine_keys(core))
    assert len(engine_keys(core)) == 6


def test_requests_of_different_salts_share_no_block_and_those_of_one_do() -> None:
    core = RecordingCore(block_size=4)
    for name, salt in (("a", ""), ("b", "mine"), ("c", "yours"), ("d", "mine"), ("e", "")):
        core.send(name, PROMPT, max_tokens=1, ignore_eos=True, cache_salt=salt)
        core.run()
    cached = {name: core.finished(name).usage.cached_tokens for name in "abcde"}
    assert cached == {"a": 0, "b": 0, "c": 0, "d": 16, "e": 16}


def test_only_full_blocks_have_keys_and_no_more_than_asked_for() -> None:
    keys = prefix_keys(PROMPT, 4, 100)
    assert len(keys) == 4
    assert prefix_keys(PROMPT, 4, 2) == keys[:2]
    assert prefix_keys(PROMPT[:3], 4, 100) == ()


def test_what_was_sent_is_found_up_to_the_first_block_that_differs() -> None:
    index = PrefixIndex(100)
    index.add("a", prefix_keys(PROMPT, 4, 100), 1.0)
    other = (*PROMPT[:8], 99, *PROMPT[9:])
    assert index.match("a", prefix_keys(PROMPT, 4, 100)) == 4
    assert index.match("a", prefix_keys(other, 4, 100)) == 2
    assert index.match("b", prefix_keys(PROMPT, 4, 100)) == 0


def test_the_holders_of_a_prompt_are_those_who_match_and_how_far() -> None:
    index = PrefixIndex(100)
    index.add("both", [b"1", b"2"], 1.0)
    index.add("head", [b"1"], 1.0)
    index.add("tail", [b"2"], 1.0)
    index.add("gone", [b"1"], 1.0)
    index.forget("gone")
    keys = [b"1", b"2", b"3"]
    found = index.holders(keys)
    assert found == {"both": 2, "head": 1}
    assert found == {name: depth for name in ("both", "head", "tail", "gone") if (depth := index.match(name, keys))}
    assert index.holders([]) == {}


def test_what_a_complete_report_lacks_goes_with_the_engines_own_eviction() -> None:
    index = PrefixIndex(100)
    index.add("a", [b"1", b"2"], 1.0)
    index.report("a", [b"1"], 2.0, complete=True, max_cached=100)
    assert index.match("a", [b"1", b"2"]) == 1
    assert index.num_blocks("a") == 1


def test_what_was_sent_after_a_report_was_taken_outlives_it() -> None:
    """A report that arrives late must not take away what is on its way."""
    index = PrefixIndex(100)
    index.add("a", [b"1"], 3.0)
    index.report("a", [], 2.0, complete=True, max_cached=0)
    assert index.match("a", [b"1"]) == 1
    index.report("a", [], 4.0, complete=True, max_cached=0)
    assert index.match("a", [b"1"]) == 0


def test_a_report_that_was_cut_takes_nothing_away_but_what_cannot_be_there_any_more() -> None:
    index = PrefixIndex(100)
    index.add("a", [b"1", b"2", b"3", b"4"], 1.0)
    index.report("a", [b"9"], 2.0, complete=False, max_cached=100)
    assert index.match("a", [b"1", b"2", b"3", b"4"]) == 4
    index.report("a", [b"9"], 3.0, complete=False, max_cached=3)
    assert index.match("a", [b"1", b"2", b"3", b"4"]) == 2, "tails go before heads"
    assert index.match("a", [b"9"]) == 1


def test_another_ingress_replicas_prefixes_come_with_the_report() -> None:
    index = PrefixIndex(100)
    index.report("a", [b"1", b"2"], 2.0, complete=True, max_cached=2)
    assert index.match("a", [b"1", b"2", b"3"]) == 2


def test_beyond_the_bound_the_least_recently_known_goes_first_and_tails_before_heads() -> None:
    index = PrefixIndex(4)
    index.add("a", [b"1", b"2"], 1.0)
    index.add("a", [b"3", b"4", b"5"], 2.0)
    assert index.match("a", [b"1", b"2"]) == 1
    assert index.match("a", [b"3", b"4", b"5"]) == 3


def test_a_forgotten_replica_holds_nothing() -> None:
    index = PrefixIndex(4)
    index.add("a", [b"1"], 1.0)
    index.forget("a")
    assert (index.match("a", [b"1"]), index.num_blocks("a")) == (0, 0)


keys = st.lists(st.integers(0, 40).map(lambda n: n.to_bytes(1)), max_size=12, unique=True)
sends = st.tuples(st.just("send"), keys, st.booleans(), st.just(0))
reports = st.tuples(st.just("report"), keys, st.booleans(), st.integers(0, 20))


@settings(deadline=None)
@given(traffic=st.lists(sends | reports, max_size=40), bound=st.integers(1, 20))
def test_the_bound_on_memory_holds_under_any_traffic(
    traffic: list[tuple[str, list[bytes], bool, int]], bound: int
) -> None:
    index = PrefixIndex(bound)
    for now, (kind, blocks, flag, most) in enumerate(traffic):
        if kind == "send":
            index.add("a", blocks, now)
        else:
            index.report("a", blocks, now - 3, complete=flag, max_cached=most)
        assert index.num_blocks("a") <= bound
        assert index.match("a", blocks) <= len(blocks)
