"""Contracts of a router's whole way from a prompt to the replicas that it is to try."""

from __future__ import annotations

import dataclasses
from collections import Counter
from random import Random
from typing import Any

import pytest

from benchmarks import routing as bench
from engine.kv_tiers import Tier
from engine.multimodal_inputs import SpanInput
from engine.prefix_index import prefix_keys
from engine.protocol import PrefillCosts, SamplingParams, Submission
from serve_app.routing.chooser import Chooser
from serve_app.settings.routing import RoutingSettings
from tests.support.reports import stats

BLOCK_SIZE = 4
NOW = 100.0
ASK = Submission("r", tuple(range(100)), SamplingParams(max_tokens=1, seed=0))


def chooser(*names: str, **routing: float) -> Chooser:
    made = Chooser(RoutingSettings.model_validate(routing), BLOCK_SIZE, Random(0))
    made.fleet.update({name: {} for name in names})
    return made


def test_a_request_counts_at_its_first_choice_with_what_is_to_be_computed_there() -> None:
    router = chooser("a", "b")
    router.fleet.open("one")
    (first,), (second,) = router.place("one", ASK, ["a", "b"], NOW).ranks
    assert router.fleet.load(first, NOW).num_queued_tokens == 100
    assert router.fleet.load(second, NOW).num_requests == 0
    router.fleet.open("two")
    choice = router.place("two", ASK, [first], NOW)
    assert choice.num_cached_tokens == {first: 100}
    assert router.fleet.load(first, NOW).num_queued_tokens == 101, "the last token is computed whatever is cached"


def test_a_prompt_with_another_image_or_of_another_salt_is_cached_nowhere() -> None:
    def asks(data: bytes, salt: str = "") -> Submission:
        image = SpanInput.of("image", 0, (1, 4, 24), data)
        return dataclasses.replace(ASK, inputs=(image,), cache_salt=salt)

    router = chooser("a", "b")
    router.fleet.open("one")
    (first,), _ = router.place("one", asks(b"one"), ["a", "b"], NOW).ranks
    assert router.place("two", asks(b"one"), ["a", "b"], NOW).num_cached_tokens == {first: 100}
    assert router.place("two", asks(b"other"), ["a", "b"], NOW).num_cached_tokens == {}
    assert router.place("two", asks(b"one", "mine"), ["a", "b"], NOW).num_cached_tokens == {}


def test_each_request_weighs_what_the_settings_say_beside_its_tokens() -> None:
    """The loads are one queued token, and eight requests that decode:
    at 0 tokens a request the latter count nothing."""
    reports = {"queues": stats(NOW, requests=1, queued=1), "decodes": stats(NOW, requests=8)}
    for weight, chosen in ((0, "decodes"), (64, "queues")):
        router = chooser(request_tokens=weight)
        router.fleet.update(reports)
        assert router.place("r", ASK, list(reports), NOW).ranks[0] == [chosen]


def on_disk(router: Chooser, submission: Submission) -> dict[str, Any]:
    """Return the report of an engine whose disk has all blocks of a prompt."""
    keys = prefix_keys(submission.prompt_token_ids, BLOCK_SIZE, 100)
    tier = (Tier.DISK.value, b"".join(keys), True, len(keys))
    return stats(NOW, requests=1, queued=50) | {"tiers": [tier]}


@pytest.mark.parametrize(("weight", "chosen"), [(0.8, "disk"), (0.2, "idle")])
def test_an_engine_with_the_prompt_on_disk_is_worth_as_many_tokens_as_the_setting_says(
    weight: float, chosen: str
) -> None:
    """It has 50 tokens to compute before, and loading its 100 tokens saves 80 of them, or 20."""
    router = chooser(tier_hit_weight=weight, request_tokens=0)
    router.fleet.update({"disk": on_disk(router, ASK), "idle": stats(NOW)})
    assert router.place("r", ASK, ["disk", "idle"], NOW).ranks[0] == [chosen]


def test_what_is_loaded_is_not_computed_but_takes_room_and_is_expected_as_cached() -> None:
    router = chooser("a")
    router.fleet.update({"a": on_disk(router, ASK)})
    before = router.fleet.load("a", NOW)
    router.fleet.open("one")
    choice = router.place("one", ASK, ["a"], NOW)
    after = router.fleet.load("a", NOW)
    assert choice.num_cached_tokens == {"a": 100}
    assert router.most_cached(ASK) == {"a": 100}
    assert after.num_queued_tokens == before.num_queued_tokens + 1
    assert before.num_free_tokens is not None
    assert after.num_free_tokens == before.num_free_tokens - 101
    router.fleet.close("one")
    assert router.fleet.load("a", NOW).num_free_tokens == before.num_free_tokens


FAST, SLOW = PrefillCosts(0.001, 1e-6), PrefillCosts(0.002, 2e-6)


def test_of_two_engines_the_twice_as_fast_one_gets_twice_as_many_prompts() -> None:
    router = chooser(request_tokens=0)
    router.fleet.update({"fast": stats(NOW, costs=FAST), "slow": stats(NOW, costs=SLOW)})
    sent = Counter[str]()
    for number in range(300):
        router.fleet.open(f"r{number}")
        prompt = (number, *range(500))
        submission = Submission(f"r{number}", prompt, SamplingParams(max_tokens=1, seed=0))
        sent[router.place(f"r{number}", submission, ["fast", "slow"], NOW).ranks[0][0]] += 1
    assert sent["fast"] == pytest.approx(200, abs=2)


def test_a_live_request_weighs_more_on_a_slower_engine() -> None:
    router = chooser(request_tokens=64)
    router.fleet.update({"fast": stats(NOW, requests=9, costs=FAST), "slow": stats(NOW, requests=6, costs=SLOW)})
    assert router.place("r", ASK, ["fast", "slow"], NOW).ranks[0] == ["fast"]


def test_one_engine_without_predictions_lets_all_be_compared_by_tokens() -> None:
    """By time the slow one would come last, whatever it is compared with."""
    reports = {
        "busy": stats(NOW, queued=500, queued_s=0.1, costs=FAST),
        "slow": stats(NOW, queued=100, queued_s=60.0, costs=SLOW),
    }
    for old, chosen in (({}, "busy"), ({"old": stats(NOW, queued=900)}, "slow")):
        router = chooser()
        router.fleet.update(reports | old)
        assert router.place("r", ASK, [*reports, *old], NOW).ranks[0] == [chosen]


def test_full_and_avoided_replicas_come_where_placement_puts_them() -> None:
    router = chooser("a", "b", "c")
    assert router.place("r", ASK, ["a", "b", "c"], NOW, avoid=("a",), full={"b"}).ranks == [["c"], ["b"]]
    assert router.place("r", ASK, [], NOW).ranks == []


@pytest.mark.parametrize("by_time", [False, True])
def test_the_benchmark_chooses_among_as_many_as_it_says(by_time: bool) -> None:
    found = bench.measure(5, 20, by_time=by_time)
    assert (found["replicas"], found["by_time"]) == (5, by_time)
    assert found["ms_p50"] > 0
