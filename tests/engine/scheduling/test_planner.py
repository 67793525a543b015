"""Contracts of the planner: what a step computes. Examples from the specification's S1-B6 keep their numbers."""

from __future__ import annotations

import pytest

from engine.config import SchedulerConfig
from engine.protocol import SamplingParams, Submission
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.planner import LONG_CHAIN, LOOK_AGAIN_S
from engine.scheduling.request import Request, create_request
from engine.scheduling.scheduler import Scheduler
from engine.step import RowKind
from tests.support.engines import RecordingCore, prompt_only, resolved_config

UNALIGNED = SchedulerConfig(chunk_align=1)
FULL = SchedulerConfig(reserve_mode="full", preempt_policy="none")


def scheduler_with(prompts: list[int], **overrides: object) -> Scheduler:
    config = resolved_config(
        **{"max_model_len": 20_000, "num_kv_blocks": 10_000, "max_num_batched_tokens": 4096, **overrides}
    )
    scheduler = Scheduler(config, BlockManager(config.num_kv_blocks, config.block_size))
    for i, length in enumerate(prompts):
        scheduler.add(request_of(str(i), length, i, config), now=0.0)
    return scheduler


def request_of(request_id: str, length: int, arrival_index: int, config: object, max_tokens: int = 8) -> Request:
    prompt = tuple((arrival_index * 7 + i) % 31 for i in range(length))
    return create_request(Submission(request_id, prompt, SamplingParams(max_tokens=max_tokens)), config, arrival_index)


@pytest.mark.parametrize(
    ("prompts", "budget", "chunks"),
    [
        ([5000, 8], 512, [512]),
        ([100, 100, 100], 512, [100, 100, 100]),
        ([200, 200, 300], 512, [200, 200, 112]),
        ([512, 8], 1024, [512, 8]),
        ([3000, 900, 10], 4000, [3000, 900, 10]),
    ],
)
def test_prefill_chunks_fill_the_budget_in_arrival_order(prompts: list[int], budget: int, chunks: list[int]) -> None:
    rows = scheduler_with(prompts, max_prefill_tokens=budget, scheduler=UNALIGNED).plan(0.0).rows
    assert [row.num_tokens for row in rows] == chunks


def test_planning_changes_nothing() -> None:
    scheduler = scheduler_with([100, 600], max_prefill_tokens=512)
    assert scheduler.plan(0.0) == scheduler.plan(0.0)
    assert scheduler.num_running == 0


def test_the_chunk_that_completes_a_prompt_is_last_also_when_it_has_one_token() -> None:
    core = RecordingCore(max_num_batched_tokens=16, max_prefill_tokens=16)
    core.send("a", range(17), max_tokens=2)
    core.run()
    kinds = [(row.kind, len(row.token_ids)) for plan in core.plans for row in plan.rows]
    assert kinds == [(RowKind.MIDDLE, 16), (RowKind.LAST, 1), (RowKind.DECODE, 1)]


def test_every_decoding_request_has_a_row_in_every_step_while_a_long_prompt_is_prefilled() -> None:
    core = RecordingCore(max_num_batched_tokens=12, max_prefill_tokens=12, scheduler=UNALIGNED)
    for name in "abc":
        core.send(name, range(1, 4), max_tokens=20, ignore_eos=True)
    core.keep(core.step())
    core.send("long", [5] * 100, max_tokens=1)
    while "long" not in core.events or len(core.events["long"]) < 2:
        core.keep(core.step())
    mixed = [plan for plan in core.plans if any(row.request_id == "long" for row in plan.rows)]
    assert len(mixed) > 5
    for plan in mixed[:-1]:
        assert [row.request_id for row in plan.rows] == ["a", "b", "c", "long"]
        assert plan.num_tokens == 12, "what decode rows leave of the budget goes to the chunk"


def test_max_prefill_tokens_caps_prefill_rows_and_not_decode_rows() -> None:
    core = RecordingCore(max_num_batched_tokens=32, max_prefill_tokens=4, max_num_seqs=8)
    for name in "abcdef":
        core.send(name, [1, 2, 3, 4], max_tokens=8, ignore_eos=True)
    core.run()
    for plan in core.plans:
        assert sum(len(row.token_ids) for row in plan.rows if row.kind is not RowKind.DECODE) <= 4
    assert max(sum(row.kind is RowKind.DECODE for row in plan.rows) for plan in core.plans) == 6


def test_a_request_that_does_not_fit_yet_waits_and_is_not_overtaken() -> None:
    core = RecordingCore(num_kv_blocks=10, enable_prefix_caching=False, scheduler=FULL)
    core.send("running", range(1, 17), max_tokens=9, ignore_eos=True)  # 6 of 10 blocks for its whole life
    core.keep(core.step())
    core.send("large", range(2, 20), max_tokens=7)  # 6 blocks
    core.send("small", [3], max_tokens=1)
    core.keep(core.step())
    assert core.load().num_waiting == 2
    core.run()
    first_step = {row.request_id: i for i, plan in reversed(list(enumerate(core.plans))) for row in plan.rows}
    assert first_step["large"] <= first_step["small"]


def test_seats_are_never_exceeded_by_partial_prefills_and_decodes_together() -> None:
    core = RecordingCore(max_num_seqs=3, max_num_batched_tokens=8, max_prefill_tokens=8)
    for i in range(12):
        core.send(f"r{i}", [i + 1] * (3 + 5 * (i % 4)), max_tokens=1 + i % 5)
    while core.has_work:
        core.keep(core.step())
        assert core.load().num_running <= 3
    assert max(len(plan.rows) for plan in core.plans) == 3


def test_a_request_that_waits_looks_its_prefix_up_once_an_epoch_and_not_once_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S5-R18: match, free, rematch on every tick cost O(prompt) a step while the head of the queue was blocked."""
    scheduler = scheduler_with([100], num_kv_blocks=27)
    calls = 0
    real_match = BlockManager.match

    def counting_match(self: BlockManager, hashes: list[bytes]) -> tuple[int, ...]:
        nonlocal calls
        calls += 1
        return real_match(self, hashes)

    monkeypatch.setattr(BlockManager, "match", counting_match)
    for _ in range(5):
        scheduler.plan(0.0)
    assert calls == 1


@pytest.mark.parametrize(("order", "num_waiting"), [("strict", 1), ("bypass", 8)])
def test_long_prompts_that_wait_for_memory_are_not_looked_up_in_every_step(
    order: str, num_waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = 0
    match = BlockManager.match

    def spy(blocks: BlockManager, hashes: list[bytes]) -> tuple[int, ...]:
        nonlocal looked_up
        looked_up += len(hashes) >= LONG_CHAIN
        return match(blocks, hashes)

    core = RecordingCore(
        max_model_len=4096,
        num_kv_blocks=700,
        max_num_batched_tokens=4096,
        max_prefill_tokens=4096,
        scheduler=prompt_only(admission_order=order),
        tick_ms=1000 * LOOK_AGAIN_S / 10,
    )
    prefix = [token % 29 for token in range(4 * LONG_CHAIN)]
    core.send("before", prefix, max_tokens=1)
    core.run()
    core.send("running", [30] * 1600, max_tokens=300, ignore_eos=True)
    core.keep(core.step())
    monkeypatch.setattr(BlockManager, "match", spy)
    for number in range(num_waiting):
        core.send(f"long {number}", [*prefix, *[number] * 800], max_tokens=1)
    for _ in range(20):
        core.keep(core.step())
    assert core.load().num_waiting == num_waiting
    assert looked_up <= 3 * num_waiting
    core.keep(core.abort("running"))
    core.keep(core.step())
    assert core.load().num_waiting < num_waiting, "more memory is used at once"


def test_a_long_prompt_fits_as_soon_as_the_cache_has_enough_of_its_beginning() -> None:
    """What it lacks shrinks while another request computes the same document, and no memory is freed meanwhile."""
    core = RecordingCore(
        max_model_len=4096,
        num_kv_blocks=335,
        max_num_batched_tokens=512,
        max_prefill_tokens=512,
        scheduler=prompt_only(),
        tick_ms=1000 * LOOK_AGAIN_S / 20,
    )
    document = [token % 29 for token in range(1200)]
    assert len(document) > LONG_CHAIN * core.config.block_size
    core.send("first", [*document, *[1] * 8], max_tokens=100, ignore_eos=True)
    core.keep(core.step())
    core.send("second", [*document, *[2] * 8], max_tokens=2)
    for _ in range(4):
        core.keep(core.step())
    rows = [[row.request_id for row in plan.rows] for plan in core.plans]
    assert rows == [["first"]] * 3 + [["first", "second"]] * 2, "once three chunks of the document are computed"


@pytest.mark.parametrize(("order", "first"), [("strict", "large"), ("bypass", "small")])
def test_requests_that_fit_overtake_one_that_does_not_only_in_bypass(order: str, first: str) -> None:
    core = RecordingCore(num_kv_blocks=12, scheduler=prompt_only(admission_order=order), enable_prefix_caching=False)
    core.send("running", [1] * 24, max_tokens=8, ignore_eos=True)
    core.keep(core.step())
    core.send("large", [2] * 30, max_tokens=1)
    core.send("small", [3] * 4, max_tokens=1)
    core.run()
    order_seen = [row.request_id for plan in core.plans for row in plan.rows if row.request_id != "running"]
    assert order_seen[0] == first


def test_a_request_is_overtaken_no_more_often_than_its_bound() -> None:
    core = RecordingCore(
        num_kv_blocks=12, scheduler=prompt_only(admission_order="bypass", max_overtakes=3), enable_prefix_caching=False
    )
    core.send("running", [1] * 24, max_tokens=16, ignore_eos=True)
    core.keep(core.step())
    core.send("large", [2] * 30, max_tokens=1)
    for i in range(10):
        core.send(f"s{i}", [3] * 4, max_tokens=1)
    core.run()
    order = list(
        dict.fromkeys(row.request_id for plan in core.plans for row in plan.rows if row.request_id != "running")
    )
    assert order[:4] == ["s0", "s1", "s2", "large"]
