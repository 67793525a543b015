"""Owns random lives of an engine: submissions, cancels, faults, late prompts, clock jumps, under every config.
Never decides what is right: tests/support/invariants.py does, by name. `make test-deep` runs more."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.kv_tiers import Tier
from engine.protocol import RequestRejected, SamplingParams
from tests.support.invariants import CheckedCore
from tests.support.traffic import CONFIGS, PARAMS, PROMPTS, spans


class EngineMachine(RuleBasedStateMachine):
    reached: ClassVar[Counter[str]] = Counter()
    """In how many lives each kind of thing happened: a thing that never happened was not tested."""
    core: CheckedCore

    @initialize(config=CONFIGS)
    def start(self, config: dict[str, object]) -> None:
        self.core = CheckedCore(**config)
        self.num_sent = 0

    @rule(
        data=st.data(),
        prompt=PROMPTS,
        params=PARAMS,
        priority=st.sampled_from([0, 0, 1]),
        tenant=st.sampled_from(["", "", "b"]),
        prepared=st.sampled_from([True, True, True, False]),
        timeout_s=st.sampled_from([None, None, None, 0.3]),
    )
    def submit(
        self,
        data: st.DataObject,
        prompt: tuple[int, ...],
        params: SamplingParams,
        priority: int,
        tenant: str,
        prepared: bool,
        timeout_s: float | None,
    ) -> None:
        self.num_sent += 1
        pooled = st.sampled_from([None, "mean", "last"]) if params.max_tokens == 0 else st.none()
        with suppress(RequestRejected):  # I-27 is checked inside
            self.core.accept(
                f"r{self.num_sent}",
                prompt,
                params,
                prepared=prepared,
                priority=priority,
                tenant=tenant,
                timeout_s=timeout_s,
                atomic_spans=data.draw(spans(len(prompt))),
                pooling=data.draw(pooled),
            )

    @rule(lengths=st.lists(st.integers(1, 12), min_size=3, max_size=6), max_tokens=st.integers(15, 34))
    def flood(self, lengths: list[int], max_tokens: int) -> None:
        """Submit long answers at the same time: memory that runs out is the rule here, not the exception."""
        for length in lengths:
            self.num_sent += 1
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            with suppress(RequestRejected):
                self.core.accept(f"r{self.num_sent}", tuple(range(1, length + 1)), params)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.core.checked_step()

    @precondition(lambda self: self.core.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.core.cancel(data.draw(st.sampled_from(sorted(self.core.live))))

    @precondition(lambda self: self.core._scheduler.preparing)
    @rule(data=st.data())
    def prepare(self, data: st.DataObject) -> None:
        self.core.prepared(data.draw(st.sampled_from(sorted(self.core._scheduler.preparing))))

    @precondition(lambda self: self.core.mover is not None and self.core.mover.num_under_way)
    @rule(count=st.integers(1, 8), fails=st.sampled_from([False, False, True]))
    def moves_end(self, count: int, fails: bool) -> None:
        self.core.tier_fault = fails
        self.core.let_moves_end(count)

    @precondition(lambda self: self.core.load().tiers and self.core.tier_digests(9).get(Tier.DISK))
    @rule(data=st.data())
    def disk_loses_a_block(self, data: st.DataObject) -> None:
        self.core.lose(data.draw(st.sampled_from(self.core.tier_digests(9)[Tier.DISK])))

    @precondition(lambda self: self.core.mover is not None)
    @rule()
    def cache_is_reset(self) -> None:
        self.core.reset_prefix_cache()

    @rule(fault=st.sampled_from(["step", "row", "memory", "memory"]))
    def break_the_next_step(self, fault: str) -> None:
        self.core.fault = fault

    @rule(seconds=st.sampled_from([0.05, 0.6, 20.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.core.now += seconds

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.core.fault = None
            self.core.finish()
            self.reached.update(self.core.reached())


class TestEngine(EngineMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(
        max_examples=200,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


class HybridMachine(EngineMachine):
    """Runs lives with drafts and recurrent states.
    They are a third of those above, but rarely have spans as well there."""

    @initialize(
        config=CONFIGS.filter(lambda config: config.get("recurrent_state") and "num_speculative_tokens" in config)
    )
    def start(self, config: dict[str, object]) -> None:
        super().start(config)


class TestHybridEngine(HybridMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(TestEngine.settings, max_examples=100)


class TiersMachine(EngineMachine):
    """Runs lives with lower tiers, of which a third of those above have any, in caches that are too small."""

    @initialize(config=CONFIGS.filter(lambda config: "mover" in config and config["num_kv_blocks"] <= 46))
    def start(self, config: dict[str, object]) -> None:
        super().start(config)
        for first in range(3):
            self._ask(tuple((first + 3 * place) % 32 for place in range(24)), 4)

    @precondition(lambda self: len(self.core.submitted) > len(self.core.live))
    @rule(
        data=st.data(),
        first=st.integers(0, 31),
        num_steps=st.integers(0, 40),
        max_tokens=st.integers(1, 20),
        then=st.sampled_from(["moves end", "nothing moves", "others need the memory"]),
    )
    def ask_again(self, data: st.DataObject, first: int, num_steps: int, max_tokens: int, then: str) -> None:
        """Let other prompts take the cache, and then ask with one of the longest prompts that were answered before."""
        size = self.core.config.num_kv_blocks * self.core.config.block_size
        for number in range(size // 30 + 1):
            crowd = tuple((first + number + place) % 32 for place in range(29))
            self._ask((number % 32, *crowd), 1)
        for _ in range(num_steps):
            self.core.let_moves_end(100)
            self.core.checked_step()
        if then == "others need the memory":
            for _ in range(3):
                self._ask((first, first), 34)
            self.steps(1)
        ended = sorted((name for name in self.core.submitted if name not in self.core.live), key=self._length)
        if ended:
            self._ask(self.core.submitted[data.draw(st.sampled_from(ended[-3:]))][0], max_tokens)
        self.steps(2)
        self.core.now += 20.0 if then == "nothing moves" else 0.0
        self.core.let_moves_end(100 if then == "moves end" else 0)
        self.steps(20 if then == "others need the memory" else 2)

    def _length(self, name: str) -> tuple[int, str]:
        return len(self.core.submitted[name][0]), name

    def _ask(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        self.num_sent += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        with suppress(RequestRejected):
            self.core.accept(f"r{self.num_sent}", prompt, params)


class TestTiers(TiersMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(TestEngine.settings, max_examples=120)


class DraftsBesideOverlapMachine(EngineMachine):
    """Runs lives in which rows stand aside while their drafts are in flight."""

    @initialize(config=CONFIGS.filter(lambda config: config.get("overlap") and "num_speculative_tokens" in config))
    def start(self, config: dict[str, object]) -> None:
        super().start(config)


class TestDraftsBesideOverlap(DraftsBesideOverlapMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(TestEngine.settings, max_examples=60)


def lets_others_wait(config: dict[str, Any]) -> bool:
    """Whether long prompts step aside, or prompts are computed whole."""
    policy = config["scheduler"]
    aside = policy.long_prefill_defer_tokens > 0 and policy.long_prefill_defer_ms > 0
    return aside or not policy.enable_chunked_prefill


def with_chunks_ahead(config: dict[str, Any]) -> dict[str, Any]:
    """Let chunks go ahead of decode rows, in steps that are too small for both and that nothing else holds back."""
    asked = config["scheduler"]
    policy = replace(
        asked,
        batch_mode="mixed_prefill_first",
        decode_starve_ms=max(asked.decode_starve_ms, 30.0),
        chunk_owner="scheduler",
        prompt_logprobs_step="mixed",
        prefill_fill_ratio=0.0,
        decode_finish_tokens=0,
    )
    if not asked.enable_chunked_prefill:
        return {**config, "scheduler": policy}
    least = config["max_num_seqs"] * (1 + config.get("num_speculative_tokens", 0)) + 1
    return {**config, "scheduler": policy, "max_num_batched_tokens": least, "max_prefill_tokens": max(least, 8)}


class WaitingMachine(EngineMachine):
    """Runs lives in which decode rows or prompts let others go first by a setting, while all of them have work."""

    @initialize(config=st.one_of(CONFIGS.map(with_chunks_ahead), CONFIGS.filter(lets_others_wait)))
    def start(self, config: dict[str, object]) -> None:
        super().start(config)

    @rule(lengths=st.lists(st.sampled_from([2, 5, 24, 30]), min_size=2, max_size=4), count=st.integers(1, 8))
    def streams_beside_prompts(self, lengths: list[int], count: int) -> None:
        """Let two requests decode, and then send long and short prompts."""
        for length, max_tokens in ((1, 25), (2, 25), *((length, 2) for length in lengths)):
            self.num_sent += 1
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            with suppress(RequestRejected):
                self.core.accept(f"r{self.num_sent}", tuple(range(length % 7 + 1, length % 7 + 1 + length)), params)
            if max_tokens == 25:
                self.core.checked_step()
        self.steps(count)


class TestWaiting(WaitingMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(TestEngine.settings, max_examples=60)


def test_the_lives_above_reach_what_they_are_to_check() -> None:
    rare = "drafts, states and spans in a step"  # one life in thousands: tests.deep asks for it
    never = [thing for thing in CheckedCore.THINGS if not EngineMachine.reached[thing] and thing != rare]
    assert not never
