"""Contracts of drafts that are looked up in a request's own text: the answer does not show them, and they stop when
they do not pay.
Texts that repeat themselves are scripted; all others are hashes, which nobody can foresee."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from engine.config import ConfigError, EngineConfig, SchedulerConfig, SpeculativeConfig
from engine.observer import Verified
from engine.protocol import FinishReason
from engine.scheduling.planner import Plan
from engine.scheduling.request import Request
from engine.speculation.speculation import LONGEST_WAIT, PROBE_STEPS, Speculation
from engine.step import RowKind
from tests.engine.batch.test_grammar import PERSON, grammar_core, is_person, text_of
from tests.support.drafting import (
    FEW,
    PROMPT,
    SCHEDULES,
    check_another_engine_goes_on,
    check_nobody_can_tell,
    decode_rows,
    decoding_requests,
)
from tests.support.engines import RecordingCore, resolved_config

EAGER = SpeculativeConfig(method="suffix", min_match=1, num_tokens=6, adaptive=False, free_tokens=8)
NGRAM = replace(EAGER, method="ngram", max_match=3)
ADAPTIVE = replace(EAGER, adaptive=True, min_match=2, num_tokens=8)


def looking(speculative: SpeculativeConfig = EAGER, **overrides: Any) -> RecordingCore:
    settings = {"num_speculative_tokens": 3, "max_num_batched_tokens": 64, **overrides}
    return RecordingCore(speculative=speculative, **settings)


def num_drafted(core: RecordingCore, request_id: str | None = None) -> int:
    return sum(len(row.token_ids) - 1 for row in decode_rows(core, request_id))


# --- the same answer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculative", [EAGER, NGRAM, ADAPTIVE], ids=["suffix", "ngram", "adaptive"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_event_but_its_step_is_that_of_the_plain_loop(
    speculative: SpeculativeConfig, schedule: str, temperature: float
) -> None:
    core = looking(speculative, alphabet=FEW, **SCHEDULES[schedule])
    check_nobody_can_tell(core, schedule, temperature, num_texts=9)
    assert num_drafted(core) > (0 if speculative.adaptive else 20)
    assert core._speculation is not None
    assert core._speculation._lookups == {}, "nothing is kept of requests that have ended"


def test_another_engine_goes_on_from_any_token_of_an_accepted_draft() -> None:
    check_another_engine_goes_on(looking)


def test_an_answer_in_a_grammar_is_drafted_what_is_forced_and_looked_up_where_nothing_is() -> None:
    plain, core = grammar_core(), grammar_core(num_speculative_tokens=3, speculative=EAGER)
    for engine in (plain, core):
        engine.send("a", list(b'{"name": "a name", "age": 99, "tags": []}'), max_tokens=100, seed=3, grammar=PERSON)
        engine.run()
    assert core.tokens("a") == plain.tokens("a")
    assert is_person(text_of(core, "a"))
    methods = {verified.method for verified in all_verified(grammar_core(num_speculative_tokens=3, speculative=EAGER))}
    assert methods == {"grammar", "suffix"}


def all_verified(core: RecordingCore) -> list[Verified]:
    core.send("a", list(b'{"name": "a name", "age": 99, "tags": []}'), max_tokens=100, seed=3, grammar=PERSON)
    found: list[Verified] = []
    while core.has_work:
        core.keep(core.step())
        found += core.last_step.verified
    return found


def test_no_token_that_would_end_the_answer_is_drafted() -> None:
    """What followed that token earlier in the text would be verified for nothing."""
    core = looking(reply=[7, 8, 1, 2, 9] * 6)
    core.send("a", [7, 8, 9, 1, 2, 7, 8, 9], max_tokens=30, stop_token_ids=(9,))
    core.run()
    rows = decode_rows(core)
    assert not any(9 in row.token_ids[1:] for row in rows)
    end = core.finished("a")
    assert (core.tokens("a"), end.reason, end.stop_token_id) == ([7, 8, 1, 2], FinishReason.STOP, 9)
    plain = looking(reply=[7, 8, 1, 2, 9] * 6)
    plain.send("a", [7, 8, 9, 1, 2, 7, 8, 9], max_tokens=30)
    plain.run()
    assert any(9 in row.token_ids[1:] for row in decode_rows(plain)), "a token that would not end the answer is drafted"


# --- what it saves, and what it may cost -----------------------------------------------------------------------------


@pytest.mark.parametrize("speculative", [EAGER, NGRAM, ADAPTIVE], ids=["suffix", "ngram", "adaptive"])
def test_a_text_that_repeats_itself_takes_a_fraction_of_the_steps(speculative: SpeculativeConfig) -> None:
    reply = [3, 1, 4, 1, 5, 9, 2, 6] * 12
    core = looking(speculative, reply=reply)
    core.send("a", [2, 7], max_tokens=96, ignore_eos=True)
    core.run()
    assert core.tokens("a") == reply
    assert core.load().num_steps < 32


def test_rows_carry_no_more_drafts_than_asked_and_all_together_what_a_full_engine_has_room_for() -> None:
    core = looking(replace(EAGER, num_tokens=8), max_num_seqs=4, num_speculative_tokens=2, reply=[1, 2] * 60)
    for i in range(4):
        core.send(f"r{i}", [1, 2, 1, 2], max_tokens=80 - 20 * i, ignore_eos=True)
    core.run()
    drafted = [[len(row.token_ids) - 1 for row in plan.rows if row.kind is RowKind.DECODE] for plan in core.plans]
    assert {
        len(drafts): max(sum(lengths) for lengths in drafted if len(lengths) == len(drafts)) for drafts in drafted
    } == {
        0: 0,
        1: 8,
        2: 10,
        3: 9,
        4: 8,
    }, "what four rows of three tokens have room for"


def test_drafts_are_given_up_before_any_request_loses_memory() -> None:
    scheduler = SchedulerConfig(reserve_mode="prompt", watermark_blocks=0, preempt_policy="lifo")
    core = looking(replace(EAGER, num_tokens=8), block_size=2, num_kv_blocks=26, scheduler=scheduler, reply=[1, 2] * 40)
    plans: list[tuple[Plan, dict[str, bool]]] = []
    plan_of = core._scheduler.plan

    def watched(now: float) -> Plan:
        drafted = {name: r.drafts is not None for name, r in core._scheduler.decoding.items()}
        plans.append((plan_of(now), drafted))
        return plans[-1][0]

    core._scheduler.plan = watched  # type: ignore[method-assign]
    for i in range(4):
        core.send(f"r{i}", [1, 2, 1, 2], max_tokens=30, ignore_eos=True)
    core.run()
    for i in range(4):
        assert core.tokens(f"r{i}")[:4] == [1, 2, 1, 2]
    gave_up = 0
    for plan, drafts in plans:
        decodes = [row for row in plan.rows if row.kind is RowKind.DECODE]
        if plan.preempted:
            assert {row.num_tokens for row in decodes} <= {1}
        elif any(drafts.values()) and decodes:
            gave_up += all(row.num_tokens == 1 for row in decodes)
    assert gave_up, "steps in which giving up drafts was enough"


# --- when it does not pay --------------------------------------------------------------------------------------------


def test_drafts_that_are_never_right_are_given_up_but_for_rare_tries() -> None:
    core = looking(replace(ADAPTIVE, min_match=1), max_model_len=1024, num_kv_blocks=300)
    core.send("a", PROMPT, max_tokens=800, ignore_eos=True, temperature=1.0, seed=1)
    core.run()
    assert core.tokens("a") == answer_long(PROMPT, max_tokens=800, ignore_eos=True, temperature=1.0, seed=1)
    rows = decode_rows(core)
    late = [len(row.token_ids) - 1 for row in rows[200:]]
    assert 0 < sum(late) <= len(late) / PROBE_STEPS + 20, "now and then one is right, by chance"


def answer_long(prompt: list[int], **params: Any) -> list[int]:
    core = RecordingCore(max_model_len=1024, num_kv_blocks=300)
    core.send("a", prompt, **params)
    core.run()
    return core.tokens("a")


def test_beside_many_rows_nothing_is_drafted_or_even_looked_at_until_few_are_left() -> None:
    core = looking(
        ADAPTIVE,
        max_num_seqs=24,
        max_num_batched_tokens=200,
        num_kv_blocks=600,
        reply=[1, 2, 3] * 60,
        max_model_len=300,
    )
    for i in range(24):
        core.send(f"r{i}", [1, 2, 3, 1, 2, 3], max_tokens=60 if i else 150, ignore_eos=True)
    core.run()
    decodes = [[len(row.token_ids) for row in plan.rows if row.kind is RowKind.DECODE] for plan in core.plans]
    assert sum(len(lengths) >= 20 for lengths in decodes) > 40
    assert all(max(lengths) == 1 for lengths in decodes if len(lengths) >= 20)
    assert num_drafted(core, "r0") > 50
    assert core.tokens("r0") == ([1, 2, 3] * 60)[:150]


def requests(count: int) -> tuple[Speculation, list[Request]]:
    """Make requests whose texts repeat themselves, for an engine that runs no steps."""
    config = resolved_config(speculative=ADAPTIVE, num_speculative_tokens=3, max_num_batched_tokens=64)
    return Speculation(config), decoding_requests(config, count)


def proposals(speculation: Speculation, decoding: list[Request], right: bool, steps: int) -> Iterator[int]:
    """Return how many tokens each step is drafted, if all drafts are right or all are wrong."""
    for _ in range(steps):
        drafted = speculation.propose(decoding)
        yield sum(len(drafts) for _, drafts in drafted)
        for request, drafts in drafted:
            speculation.judge(request, len(drafts), len(drafts) if right else 0)


def test_a_text_that_becomes_foreseeable_again_is_drafted_again() -> None:
    speculation, decoding = requests(1)
    wrong = list(proposals(speculation, decoding, right=False, steps=600))
    assert wrong[0] > 0
    tries = [step for step, count in enumerate(wrong) if count]
    assert max(wrong[30:]) == 1
    assert max(later - earlier for earlier, later in pairwise(tries)) in range(100, LONGEST_WAIT + 2)
    right = list(proposals(speculation, decoding, right=True, steps=LONGEST_WAIT + 4 * PROBE_STEPS))
    assert right[-1] == 7, "as far as is cheap"


def test_one_request_is_tried_at_a_time_and_each_in_its_turn() -> None:
    speculation, decoding = requests(6)
    for _ in proposals(speculation, decoding, right=False, steps=100):
        pass
    tried: list[str] = []
    for _ in range(PROBE_STEPS * 200):
        drafted = speculation.propose(decoding)
        assert len(drafted) <= 1
        for request, drafts in drafted:
            assert len(drafts) == 1
            tried.append(request.request_id)
            speculation.judge(request, 1, 0)
    assert set(tried[:12]) == {f"r{number}" for number in range(6)}


def test_what_was_right_of_others_is_where_a_new_request_begins() -> None:
    wrong, decoding = requests(4)
    for _ in proposals(wrong, decoding[:3], right=False, steps=60):
        pass
    fresh, _ = requests(0)
    assert sum(len(drafts) for _, drafts in fresh.propose(decoding[3:])) > 1
    assert sum(len(drafts) for _, drafts in wrong.propose(decoding[3:])) <= 1


# --- what is reported of it ------------------------------------------------------------------------------------------


def test_drafted_and_accepted_tokens_are_reported_with_each_step() -> None:
    core = looking(reply=[1, 2, 3, 1, 2, 4] * 10)
    core.send("a", [9], max_tokens=50, ignore_eos=True)
    verified: list[Verified] = []
    while core.has_work:
        core.keep(core.step())
        verified += core.last_step.verified
    assert {(event.request_id, event.method) for event in verified} == {("a", "suffix")}
    assert sum(event.num_drafted for event in verified) == num_drafted(core)
    assert sum(event.num_accepted for event in verified) == 50 - 1 - len(decode_rows(core))
    assert all(0 <= event.num_accepted <= event.num_drafted > 0 for event in verified)


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"speculative": NGRAM, "num_speculative_tokens": 0}, "speculative.method is ngram, .* is 0"),
    ],
)
def test_a_method_that_could_not_act_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        EngineConfig(**settings)


def test_bounds_of_the_matches_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"min_match \(5\) must not exceed max_match \(4\)"):
        SpeculativeConfig(method="ngram", min_match=5)
    with pytest.raises(ConfigError, match="free_tokens must be >= 1"):
        SpeculativeConfig(free_tokens=0)


def test_a_method_is_refused_where_a_step_cannot_carry_drafts() -> None:
    from engine.build.engine import build_engine

    small = EngineConfig(
        executor="fake", speculative=SpeculativeConfig(method="suffix"), max_num_seqs=2, max_num_batched_tokens=3
    )
    with pytest.raises(ConfigError, match=r"speculative.method is suffix, but a step has no room"):
        build_engine("none", small)


def test_the_fake_executor_is_served_drafts_of_its_texts() -> None:
    from engine.build.engine import build_engine

    config = EngineConfig(executor="fake", speculative=SpeculativeConfig(method="suffix"))
    engine = build_engine("none", config)
    assert engine.config.looks_up_drafts
    assert engine.config.speculates
    engine.shutdown()
    engine = build_engine("none", EngineConfig(executor="fake"))
    assert not engine.config.looks_up_drafts
    engine.shutdown()
