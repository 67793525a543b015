"""Owns random lives of an engine: submissions, cancels, faults, late prompts, clock jumps, under every config.
Never decides what is right: tests/support/invariants.py does, by name. `make test-deep` runs more."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

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
        max_examples=300,
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


class DraftsBesideOverlapMachine(EngineMachine):
    """Runs lives in which rows stand aside while their drafts are in flight."""

    @initialize(config=CONFIGS.filter(lambda config: config.get("overlap") and "num_speculative_tokens" in config))
    def start(self, config: dict[str, object]) -> None:
        super().start(config)


class TestDraftsBesideOverlap(DraftsBesideOverlapMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(TestEngine.settings, max_examples=100)


def test_the_lives_above_reach_what_they_are_to_check() -> None:
    never = [thing for thing in CheckedCore.THINGS if not EngineMachine.reached[thing]]
    assert not never
