"""Contracts of drafts by a second model: the answer does not show them. Long: what is read, when, and how much.
Texts are hashes, of which the scripted draft model foresees three tokens of four."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.async_engine import AsyncEngine
from engine.build.engine import build_engine
from engine.config import ConfigError, EngineConfig, ResolvedConfig, SpeculativeConfig
from engine.core.core import EngineCore
from engine.fake.draft_model import FakeDraftModel, UnreadTextError
from engine.fake.executor import FakeExecutor
from engine.observer import StepFacts, Verified
from engine.protocol import ErrorCode, Event, SamplingParams, Submission, Token
from engine.scheduling.request import Request
from engine.speculation.draft_budget import (
    KEPT,
    MARGIN,
    START,
    AssumedCosts,
    Beside,
    Costs,
    ModelCosts,
    Wish,
    choose_model_lengths,
    reading_pays,
)
from engine.speculation.draft_model_policy import DraftModelPolicy
from engine.speculation.speculation import LONGEST_WAIT, PROBE_STEPS
from engine.step import DRAFT_TOKEN, DraftContext, RowKind, ScheduledRequest, StepPlan
from tests.engine.batch.test_grammar import PERSON, grammar_core
from tests.support.drafting import (
    FEW,
    PROMPT,
    SCHEDULES,
    TIGHT,
    check_another_engine_goes_on,
    check_bad_fails_alone,
    check_nobody_can_tell,
    decode_rows,
    decoding_requests,
    no_logit_for_bad,
    no_room_beyond_thirty,
    row_through_a_retry,
)
from tests.support.engines import RecordingCore, answer_alone, resolved_config

ALWAYS = SpeculativeConfig(
    method="draft_model", model="a name", num_tokens=4, adaptive=False, free_tokens=8, model_cost=0.1
)
ADAPTIVE = replace(ALWAYS, adaptive=True)


class DraftingCore(RecordingCore):
    """A RecordingCore that compares in each step what the draft model is said to have read with the requests' texts."""

    def __init__(self, speculative: SpeculativeConfig = ALWAYS, **overrides: Any) -> None:
        settings = {"num_speculative_tokens": 3, "max_num_batched_tokens": 64, **overrides}
        super().__init__(speculative=speculative, **settings)
        self.verified: list[Verified] = []
        assert self.draft_model is not None
        assert self._draft_model_policy is not None
        self.reads, self.drafts = self.draft_model, self._draft_model_policy

    def step(self) -> list[Event]:
        events = super().step()
        self.verified += self.last_step.verified
        self.check_what_is_read()
        return events

    def check_nothing_is_left(self) -> None:
        assert self.drafts._readers == {}
        assert self._blocks.num_held == 0
        assert set(self.drafts._pages) <= set(range(self._blocks.num_blocks))


def num_drafted(core: RecordingCore) -> int:
    return sum(row.token_ids.count(DRAFT_TOKEN) for row in decode_rows(core))


# --- the same answer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculative", [ALWAYS, ADAPTIVE], ids=["always", "adaptive"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_event_but_its_step_is_that_of_the_plain_loop(
    speculative: SpeculativeConfig, schedule: str, temperature: float
) -> None:
    core = DraftingCore(speculative, alphabet=FEW, **SCHEDULES[schedule])
    check_nobody_can_tell(core, schedule, temperature, num_texts=3)
    assert num_drafted(core) > (0 if speculative.adaptive else 20)
    core.check_nothing_is_left()


ARRIVALS = st.lists(
    st.tuples(
        st.integers(1, 30),  # tokens of the prompt
        st.integers(1, 20),  # tokens of the answer
        st.integers(0, 2),  # the text whose beginning it shares
        st.integers(0, 6),  # steps before the next arrival
        st.none() | st.integers(1, 12),  # steps until it is cancelled
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None)
@given(arrivals=ARRIVALS, adaptive=st.booleans(), blocks=st.integers(16, 40), tokens=st.integers(17, 40))
def test_what_is_read_is_the_text_and_nothing_is_left_whichever_requests_come_go_or_lose_memory(
    arrivals: list[tuple[int, int, int, int, int | None]], adaptive: bool, blocks: int, tokens: int
) -> None:
    """Blocks are shared by prefix, given up, taken by others and found again,
    and the draft model's K and V with them."""
    core = DraftingCore(
        replace(ALWAYS, adaptive=adaptive),
        num_kv_blocks=blocks,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=tokens,
        scheduler=TIGHT,
        alphabet=FEW,
    )
    cancels: dict[str, int] = {}
    ended = set()
    for number, (prompt, answer, text, wait, cancel) in enumerate(arrivals):
        name = f"r{number}"
        core.send(name, ([text + 1, 9, 5] * 12)[:prompt], max_tokens=answer, ignore_eos=True)
        if cancel is not None:
            cancels[name] = cancel
        for _ in range(wait):
            core.keep(core.step())
            for other in [other for other, left in cancels.items() if not left]:
                ended.add(other)
                core.keep(core.abort(other))
                del cancels[other]
            cancels = {other: left - 1 for other, left in cancels.items()}
    core.run()
    for number, (prompt, answer, text, _, _) in enumerate(arrivals):
        want = answer_alone_of(FEW, ([text + 1, 9, 5] * 12)[:prompt], answer)
        got = core.tokens(f"r{number}")
        assert got == want[: len(got)] if f"r{number}" in ended else got == want
    core.check_nothing_is_left()


def answer_alone_of(alphabet: list[int], prompt: list[int], count: int) -> list[int]:
    core = RecordingCore(alphabet=alphabet, max_num_batched_tokens=10_000, enable_prefix_caching=False)
    core.send("alone", prompt, max_tokens=count, ignore_eos=True)
    core.run()
    return core.tokens("alone")


def test_another_engine_goes_on_from_any_token_of_an_accepted_draft() -> None:
    check_another_engine_goes_on(DraftingCore)


def test_an_answer_in_a_grammar_is_drafted_what_is_forced_and_by_the_model_where_nothing_is() -> None:
    plain, core = grammar_core(), grammar_core(num_speculative_tokens=3, speculative=ALWAYS)
    verified: list[Verified] = []
    for engine in (plain, core):
        engine.send("a", list(b'{"name": "a name", "age": 99, "tags": []}'), max_tokens=100, seed=3, grammar=PERSON)
        while engine.has_work:
            engine.keep(engine.step())
            verified += engine.last_step.verified
    assert core.tokens("a") == plain.tokens("a")
    assert {row.method for row in verified} == {"grammar", "draft_model"}


# --- what is read ----------------------------------------------------------------------------------------------------


def test_a_prompt_is_read_once_and_then_what_was_sampled() -> None:
    core = DraftingCore(reply=list(range(1, 31)) * 2)
    core.send("a", PROMPT, max_tokens=40, ignore_eos=True)
    core.run()
    readings = [row.draft_context for row in decode_rows(core) if row.draft_context is not None]
    assert readings[0].start == 0
    assert readings[0].token_ids[: len(PROMPT)] == tuple(PROMPT)
    for before, after in pairwise(readings):
        assert before.end <= after.start <= before.end + 4, "but what it proposed itself, and was right"
    assert core.reads.num_read < len(PROMPT) + 40


def test_a_long_text_is_read_a_step_s_worth_at_a_time_and_drafted_for_once_it_is_read() -> None:
    core = DraftingCore(num_kv_blocks=100)
    core.send("a", [3] * 150, max_tokens=40, ignore_eos=True)
    core.run()
    rows = decode_rows(core)
    read = [0 if row.draft_context is None else len(row.draft_context.token_ids) for row in rows]
    assert (read[:2], max(read)) == ([64, 64], 64)
    assert [DRAFT_TOKEN in row.token_ids for row in rows[:3]] == [False, False, True]
    assert core.tokens("a") == answer_alone([3] * 150, max_tokens=40, ignore_eos=True)


def test_what_is_read_in_a_step_is_bounded_for_all_requests_together() -> None:
    core = DraftingCore(num_kv_blocks=200)
    for i in range(5):
        core.send(f"r{i}", [3 + i] * 60, max_tokens=60, ignore_eos=True)
    core.run()
    read = [
        sum(len(row.draft_context.token_ids) for row in plan.rows if row.draft_context is not None)
        for plan in core.plans
    ]
    assert 32 < max(read) <= 64


def test_a_prefix_that_was_read_for_another_is_not_read_again() -> None:
    core = DraftingCore()
    core.send("a", [*PROMPT, 7], max_tokens=20, ignore_eos=True)
    core.run()
    core.send("b", [*PROMPT, 8], max_tokens=20, ignore_eos=True)
    core.run()
    first = next(row.draft_context for row in decode_rows(core, "b") if row.draft_context is not None)
    assert first.start == len(PROMPT) // 4 * 4
    assert core.finished("b").usage.cached_tokens == first.start


def test_a_prefix_that_only_the_model_has_computed_is_read() -> None:
    """Regression: while no request was drafted for, the draft model read nothing,
    but blocks were published all the same."""
    core = DraftingCore()
    core.send("a", PROMPT, max_tokens=1)
    core.run()
    assert core.reads.num_read == 0
    core.send("b", [*PROMPT, 8], max_tokens=20, ignore_eos=True)
    core.run()
    assert core.finished("b").usage.cached_tokens == 16
    assert next(row.draft_context for row in decode_rows(core, "b") if row.draft_context is not None).start == 0


def test_blocks_that_others_have_written_over_are_read_again() -> None:
    core = DraftingCore(num_kv_blocks=12)
    for name, text in (("a", PROMPT), ("b", [9] * 30), ("c", PROMPT)):
        core.send(name, text, max_tokens=12, ignore_eos=True)
        core.run()
    assert core.finished("c").usage.cached_tokens < 16
    assert next(row.draft_context for row in decode_rows(core, "c") if row.draft_context is not None).start < 16
    assert core.tokens("c") == core.tokens("a")


@pytest.mark.parametrize("budget", [16, 40])
def test_what_two_share_is_read_by_one_of_them_at_a_time(budget: int) -> None:
    """Kernels may clear what follows the last token of a row in its block. When two requests read into blocks that they
    shared, each lost what the other had read ahead. Acceptance fell from 100 % to 86 %, and nothing else showed it."""
    core = DraftingCore(max_num_batched_tokens=budget, max_num_seqs=3, num_kv_blocks=60, block_size=16)
    text = [1 + number % 31 for number in range(48)]
    core.send("a", [*text, *[7] * 22], max_tokens=40, ignore_eos=True)
    core.send("b", [*text, 8], max_tokens=40, ignore_eos=True)
    together = 0
    while core.has_work:
        core.keep(core.step())
        written = [
            block
            for row in core.plans[-1].rows
            if row.draft_context is not None
            for block in row.block_ids[row.draft_context.start // 16 : -(-row.draft_context.end // 16)]
        ]
        assert len(written) == len(set(written))
        together += sum(row.draft_context is not None for row in core.plans[-1].rows) > 1
    assert core.finished("b").usage.cached_tokens == 48
    assert together
    assert core.reads.num_read < 48 + 22 + 1 + 2 * 40, "once for both"


def test_two_that_begin_to_decode_together_do_not_read_into_the_same_block() -> None:
    core = DraftingCore(
        num_kv_blocks=60, block_size=4, max_num_seqs=3, max_num_batched_tokens=60, max_prefill_tokens=40
    )
    text = [1 + number % 31 for number in range(52)]
    core.send("a", text, max_tokens=20, ignore_eos=True)
    core.keep(core.step())
    core.send("b", text[:41], max_tokens=20, ignore_eos=True)
    for _ in range(2):
        core.keep(core.step())
    a, b = core.plans[-1].rows
    assert a.draft_context is not None
    assert a.draft_context.end > 40
    assert b.block_ids[0] == a.block_ids[0]
    assert b.draft_context is None, "a reads for both"
    core.run()
    assert core.finished("b").usage.cached_tokens == 40


@pytest.mark.parametrize("budget", range(15, 24))
@pytest.mark.parametrize("tail", [20, 45, 70])
def test_a_reading_that_is_cut_off_clears_nothing_that_another_has_read(budget: int, tail: int) -> None:
    """A scored prompt computes its first block anew, and so reads from its beginning, through blocks that it shares
    with a shorter request that has read them. Where the step's budget ended inside a block, the rest of the block was
    cleared. Only drafts became worse, so that nothing but a search through 137,000 lives found it."""
    core = behind_a_scored_prompt(budget, tail)
    core.check_nothing_is_left()


def test_what_was_read_for_a_request_that_came_later_is_not_read_again() -> None:
    core = behind_a_scored_prompt(budget=18, tail=45)
    read = [row.draft_context for row in decode_rows(core, "scored") if row.draft_context is not None]
    assert read[0] == DraftContext(0, (1, 2, 3, 4))
    assert read[1].start == 24


def behind_a_scored_prompt(budget: int, tail: int) -> DraftingCore:
    """Run a prompt that computes its first block anew, because it is scored, and one that shares the others."""
    core = DraftingCore(num_kv_blocks=200, block_size=4, max_num_seqs=4, max_num_batched_tokens=budget)
    text = [1 + number % 31 for number in range(25)]
    core.send("first", text[:5], max_tokens=1, ignore_eos=True)
    core.run()
    core.send("scored", [*text, *[7] * tail], max_tokens=20, prompt_logprobs=0, ignore_eos=True)
    while core.load().num_held_blocks * 4 <= 25:
        core.keep(core.step())
    core.send("behind", text, max_tokens=30, ignore_eos=True)
    core.run()
    assert core.finished("behind").usage.cached_tokens >= 20
    return core


def test_a_step_that_is_smaller_than_a_block_still_reads() -> None:
    core = DraftingCore(num_kv_blocks=20, block_size=32, max_num_seqs=2, max_num_batched_tokens=16)
    core.send("a", [1 + number % 31 for number in range(50)], max_tokens=20, ignore_eos=True)
    core.run()
    assert num_drafted(core)


def test_a_row_that_is_drafted_for_says_what_leads_to_its_newest_token() -> None:
    """This is the contract at the seam, as the scripted draft model checks it."""
    row = ScheduledRequest(
        "a", RowKind.DECODE, 5, (7, DRAFT_TOKEN), (0, 1), None, draft_context=DraftContext(0, (1, 2, 3))
    )
    model = FakeDraftModel(4, 4)
    with pytest.raises(UnreadTextError, match=r"does not end with the newest token, at 5"):
        model.fill(StepPlan(0, (row,)), lambda row, count: (1,) * count)
    with pytest.raises(UnreadTextError, match="position 0 holds None"):
        FakeDraftModel(4, 4).fill(
            StepPlan(0, (row._replace(draft_context=DraftContext(1, (2,))),)), lambda row, count: ()
        )


# --- what it saves, and what it may cost -----------------------------------------------------------------------------


@pytest.mark.parametrize("speculative", [ALWAYS, ADAPTIVE], ids=["always", "adaptive"])
def test_a_text_that_the_draft_model_foresees_takes_fewer_steps(speculative: SpeculativeConfig) -> None:
    core = DraftingCore(speculative, num_kv_blocks=100)
    core.send("a", PROMPT, max_tokens=200, ignore_eos=True)
    core.run()
    assert core.load().num_steps < 120
    assert {row.method for row in core.verified} == {"draft_model"}
    drafted, accepted = (sum(getattr(row, name) for row in core.verified) for name in ("num_drafted", "num_accepted"))
    assert accepted + core.load().num_steps == 200, "every step has given one token, and those that were foreseen"
    assert 0.4 < accepted / drafted < 0.8


def test_rows_carry_no_more_drafts_than_asked_and_all_together_what_a_full_engine_has_room_for() -> None:
    core = DraftingCore(replace(ALWAYS, num_tokens=8), max_num_seqs=4, num_speculative_tokens=2, num_kv_blocks=200)
    for i in range(4):
        core.send(f"r{i}", [1 + i, 2, 1, 2], max_tokens=110 - 20 * i, ignore_eos=True)
    core.run()
    drafted = [[len(row.token_ids) - 1 for row in plan.rows if row.kind is RowKind.DECODE] for plan in core.plans]
    most = {len(drafts): max(sum(lengths) for lengths in drafted if len(lengths) == len(drafts)) for drafts in drafted}
    assert most == {0: 0, 1: 8, 2: 10, 3: 9, 4: 8}, "what four rows of three tokens have room for"


def test_drafts_are_given_up_before_any_request_loses_memory() -> None:
    core = DraftingCore(block_size=2, num_kv_blocks=24, scheduler=TIGHT)
    for i in range(4):
        core.send(f"r{i}", [1 + i] * 4, max_tokens=30, ignore_eos=True)
    gave_up = 0
    while core.has_work:
        asked = sum(len(r.drafts.token_ids) for r in core._scheduler.decoding.values() if r.drafts is not None)
        core.keep(core.step())
        decodes = [row for row in core.plans[-1].rows if row.kind is RowKind.DECODE]
        if core.last_step.preempted:
            assert {len(row.token_ids) for row in decodes} <= {1}
        elif asked and decodes:
            gave_up += all(len(row.token_ids) == 1 for row in decodes)
    assert gave_up, "steps in which giving up drafts was enough"
    assert core.load().num_preemptions


def test_beside_many_rows_the_draft_model_does_not_run_and_catches_up_when_few_are_left() -> None:
    core = DraftingCore(ADAPTIVE, max_num_seqs=40, max_num_batched_tokens=200, num_kv_blocks=900, max_model_len=300)
    for i in range(40):
        core.send(f"r{i}", [1 + i % 9, 2, 3] * 2, max_tokens=60 if i else 150, ignore_eos=True)
    read = []
    while core.has_work:
        before = core.reads.num_read
        core.keep(core.step())
        read.append((sum(row.kind is RowKind.DECODE for row in core.plans[-1].rows), core.reads.num_read - before))
    full = [count for rows, count in read if rows >= 30]
    assert len(full) > 40
    assert not any(full)
    assert max(count for _, count in read) > 50, "what was answered meanwhile"
    alone = [row for row in core.verified if row.request_id == "r0"]
    assert sum(row.num_accepted for row in alone) > 20
    assert core.tokens("r0") == answer_long([1, 2, 3] * 2, max_tokens=150, ignore_eos=True)


def answer_long(prompt: list[int], **params: Any) -> list[int]:
    core = RecordingCore(max_model_len=1024, num_kv_blocks=300)
    core.send("a", prompt, temperature=0.0, **params)
    core.run()
    return core.tokens("a")


def requests(count: int) -> tuple[DraftModelPolicy, list[Request]]:
    """Make requests that decode, for an engine that runs no steps."""
    config = resolved_config(
        speculative=ADAPTIVE, num_speculative_tokens=3, max_num_batched_tokens=64, max_model_len=4096
    )
    made = decoding_requests(config, count)
    for request in made:
        request.token_ids.append(4)
    return DraftModelPolicy(config), made


def proposals(drafts: DraftModelPolicy, decoding: list[Request], right: bool, steps: int) -> Iterator[int]:
    """Return how many tokens each step is drafted, if all drafts are right or all are wrong."""
    for _ in range(steps):
        drafted = drafts.propose(decoding)
        yield sum(len(places) for _, places in drafted)
        for request, places in drafted:
            drafts._readers[request.request_id].num_read = len(request.token_ids) - 1
            drafts.judge(request, len(places), len(places) if right else 0)


def test_drafts_that_are_never_right_are_given_up_but_for_rare_tries_until_they_are_right_again() -> None:
    drafts, decoding = requests(1)
    wrong = list(proposals(drafts, decoding, right=False, steps=600))
    assert wrong[0] > 0
    assert max(wrong[30:]) == 1
    assert 0 < sum(wrong[200:]) <= 400 / 100
    right = list(proposals(drafts, decoding, right=True, steps=LONGEST_WAIT + 4 * PROBE_STEPS))
    assert right[-1] == ALWAYS.num_tokens


def test_a_short_answer_to_a_long_prompt_is_not_worth_reading_it() -> None:
    prompt = [5] * 200
    core = DraftingCore(ADAPTIVE, num_kv_blocks=100)
    core.send("a", prompt, max_tokens=5, ignore_eos=True)
    core.run()
    assert core.reads.num_read == 0
    core.send("b", prompt, max_tokens=50, ignore_eos=True)
    core.run()
    assert core.reads.num_read > 200


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_row_with_drafts_that_fails_alone_leaves_its_neighbours_untouched() -> None:
    core = DraftingCore(failing=no_logit_for_bad)
    check_bad_fails_alone(core)
    core.check_nothing_is_left()


def test_what_a_step_without_memory_was_to_read_is_read_by_the_next() -> None:
    core = DraftingCore(before_step=no_room_beyond_thirty)
    row = row_through_a_retry(core)
    assert row.draft_context is not None
    assert DRAFT_TOKEN in row.token_ids
    core.check_nothing_is_left()


# --- how many --------------------------------------------------------------------------------------------------------

CHANCES = st.integers(0, 100).map(lambda percent: percent / 100)
WISHES = st.lists(st.builds(Wish, CHANCES, st.integers(1, 8)), min_size=1, max_size=5)
COSTS = st.sampled_from([AssumedCosts(1), AssumedCosts(4), AssumedCosts(8), AssumedCosts(128)])


def took(lengths: list[int], beside: Beside, drafter: ModelCosts) -> float:
    """Return the time of a step with such drafts:
    the draft model's i-th pass has the rows that are drafted i tokens or more."""
    passes = [sum(length > i for length in lengths) for i in range(max(lengths, default=0))]
    tokens = beside.num_rows + beside.num_forced + sum(lengths)
    return drafter.costs.duration(tokens) + START * any(lengths) + sum(map(drafter.duration, passes))


@given(
    wishes=WISHES,
    bare=st.integers(0, 6),
    forced=st.integers(0, 6),
    room=st.integers(0, 30),
    costs=COSTS,
    ratio=st.floats(0.001, 1.5),
)
def test_proposals_are_expected_to_pay_and_every_row_keeps_its_pace(
    wishes: list[Wish], bare: int, forced: int, room: int, costs: Costs, ratio: float
) -> None:
    beside, drafter = Beside(len(wishes) + bare, forced, bare), ModelCosts(ratio, costs)
    lengths = choose_model_lengths(wishes, beside, room, costs, drafter)
    assert all(0 <= length <= wish.most for length, wish in zip(lengths, wishes, strict=True))
    assert sum(lengths) <= room
    gains = [sum(wish.chance**i for i in range(1, length + 1)) for wish, length in zip(wishes, lengths, strict=True)]
    plain, slower = took([0], beside, drafter), took(lengths, beside, drafter)
    tokens = beside.num_rows + forced
    assert (tokens + sum(gains)) / slower >= tokens / plain * (1 - 1e-9)
    assert not any(lengths) or min([*(1 + gain for gain in gains), *[1.0] * bare]) / (slower / plain) >= KEPT - 1e-9


@given(chance=st.floats(0.05, 0.99), most=st.integers(1, 8), costs=COSTS, ratio=st.floats(0.01, 0.5))
def test_alone_a_row_has_almost_as_many_proposals_as_are_best(
    chance: float, most: int, costs: Costs, ratio: float
) -> None:
    """A token is not drafted if it is expected to gain less than a quarter over what it takes."""
    beside, drafter = Beside(1, 0, 0), ModelCosts(ratio, costs)
    (length,) = choose_model_lengths([Wish(chance, most)], beside, 100, costs, drafter)
    paces = [sum(chance**i for i in range(length + 1)) / took([length], beside, drafter) for length in range(most + 1)]
    assert paces[length] >= max(paces) / MARGIN


def test_a_pass_for_one_row_of_four_does_not_pay_and_may_pay_for_all_four() -> None:
    """If rows were judged one after the other, the first would have to pay for the whole pass,
    and there would be no pass."""
    drafter = ModelCosts(0.2, AssumedCosts(16))
    likely, hopeless = Wish(0.8, 1), Wish(0.05, 1)
    rows = Beside(4, 0, 0)
    assert choose_model_lengths([likely, *[hopeless] * 3], rows, 100, drafter.costs, drafter) == [0] * 4
    assert choose_model_lengths([likely] * 4, rows, 100, drafter.costs, drafter) == [1] * 4


def test_the_more_expensive_the_draft_model_the_fewer_its_proposals_and_none_beside_many_rows() -> None:
    costs, wish = AssumedCosts(8), Wish(0.9, 8)
    by_ratio = [
        choose_model_lengths([wish], Beside(1, 0, 0), 100, costs, ModelCosts(ratio, costs))[0]
        for ratio in (0.01, 0.2, 0.4, 2.0)
    ]
    assert by_ratio == sorted(by_ratio, reverse=True)
    assert (by_ratio[0] > by_ratio[2], by_ratio[-1]) == (True, 0)
    for rows in range(24, 100):
        drafter = ModelCosts(0.1, costs)
        assert not any(choose_model_lengths([Wish(1.0, 8)] * rows, Beside(rows, 0, 0), 1000, costs, drafter))


@given(st.integers(1, 500), st.integers(1, 500), CHANCES)
def test_more_to_answer_makes_reading_pay_and_more_to_read_does_not(unread: int, left: int, chance: float) -> None:
    drafter = ModelCosts(0.1, AssumedCosts(8))
    if reading_pays(unread, left, chance, drafter):
        assert reading_pays(unread, left + 1, chance, drafter)
        assert unread == 1 or reading_pays(unread - 1, left, chance, drafter)
    assert not reading_pays(unread, left, 0.0, drafter)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_an_executor_without_a_draft_model_is_refused() -> None:
    config = resolved_config(num_speculative_tokens=3, max_num_batched_tokens=64, speculative=ALWAYS)
    with pytest.raises(ConfigError, match=r"speculative\.method is draft_model, .* has no draft model"):
        EngineCore(FakeExecutor(config.num_kv_blocks, config.block_size, range(32), verifies=True), config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "draft_model"}, r"but speculative\.model does not name one"),
        ({"method": "suffix", "model": "small"}, r"speculative\.model is small, but speculative\.method is suffix"),
        ({"model_cost": 0.5}, r"speculative\.model_cost is 0\.5, but speculative\.method is auto"),
        ({"method": "draft_model", "model": "small", "model_cost": 0}, r"model_cost must be > 0, but it is 0"),
    ],
)
def test_settings_that_would_never_act_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"overlap": True}, "overlap is true: a draft model goes on from a token"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0: num_speculative_tokens 0 disables speculation"),
    ],
)
def test_a_draft_model_where_no_token_is_drafted_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"speculative\.method is draft_model, but {reason}"):
        EngineConfig(speculative=SpeculativeConfig(method="draft_model", model="small"), **settings)


def test_the_cost_of_a_draft_model_is_the_setting_or_else_what_was_found() -> None:
    found: dict[str, Any] = dict(
        max_model_len=64,
        num_kv_blocks=8,
        vocab_size=32,
        eos_token_ids=(0,),
        dtype="none",
        device="none",
        kernels="fake",
        num_threads=1,
    )
    wished = SpeculativeConfig(method="draft_model", model="small")
    for asked, cost in ((wished, 0.3), (replace(wished, model_cost=0.7), 0.7)):
        resolved = ResolvedConfig.of(EngineConfig(speculative=asked), drafts=True, model_cost=0.3, **found)
        assert resolved.speculative.model_cost == cost
        assert resolved.has_draft_model
        assert not resolved.looks_up_drafts
    plain = ResolvedConfig.of(EngineConfig(), drafts=True, model_cost=0.3, **found)
    assert plain.speculative.model_cost is None


def test_the_fake_executor_is_served_drafts_of_a_model_that_it_makes_up() -> None:
    answers = {}
    for speculative in (SpeculativeConfig(), SpeculativeConfig(method="draft_model", model="a name")):
        engine = build_engine("none", EngineConfig(executor="fake", speculative=speculative))
        observer = Verifications()
        engine.observe(observer)
        answers[speculative] = asyncio.run(tokens_of(engine))
        engine.shutdown()
        assert bool(observer.verified) is (speculative.method == "draft_model")
    one, other = answers.values()
    assert one == other
    assert len(one) == 60


class Verifications:
    """An EngineObserver that collects what is verified of drafts."""

    def __init__(self) -> None:
        self.verified: list[Verified] = []

    def submitted(self, submission: Submission) -> None: ...

    def rejected(self, code: ErrorCode) -> None: ...

    def stepped(self, facts: StepFacts, events: Sequence[Event]) -> None:
        self.verified += facts.verified


async def tokens_of(engine: AsyncEngine) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    return [event.token_id async for event in engine.generate(PROMPT, params) if isinstance(event, Token)]
