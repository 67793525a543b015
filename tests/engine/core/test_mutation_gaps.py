"""Tests that catch reverts of known fixes which no other test of the engine would have noticed.
Never repeats a contract that another file tests; `tests/mutations.md` says which revert each of these catches."""

from __future__ import annotations

from collections import Counter

from engine.config import ResolvedConfig, SchedulerConfig
from engine.protocol import Failed, SamplingParams, Scheduled, Submission
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.forecast import Forecast
from engine.scheduling.planner import View, make_plan
from engine.scheduling.request import Request, create_request
from engine.scheduling.waiting import WaitingQueue
from engine.step import ExecutorOutOfMemoryError, StepPlan
from tests.support.engines import RecordingCore, answer_alone, resolved_config
from tests.support.plan_rows import chunks_of

PREFIX = [5, 6, 7, 8, 9, 10, 11, 12]
FULL = SchedulerConfig(reserve_mode="full", preempt_policy="none")


def prompt_of(request_id: str, arrival_index: int, length: int, config: ResolvedConfig, **fields: object) -> Request:
    """Make a prompt that was admitted and has nothing computed yet."""
    submission = Submission(request_id, tuple(range(1, length + 1)), SamplingParams(max_tokens=1), **fields)
    request = create_request(submission, config, arrival_index)
    request.target = length
    return request


def chunks_planned(config: ResolvedConfig, blocks: BlockManager, *prompts: Request) -> list[tuple[str, int]]:
    """Plan a step over these begun prompts; return (request, tokens) of its rows."""
    view = View(
        waiting=WaitingQueue(config.scheduler),
        prefilling={request.request_id: request for request in prompts},
        decoding={},
        blocks=blocks,
        resources=(),
        promised_blocks=0,
        ratio=0.5,
        now=0.0,
        prefill_limit=config.max_prefill_tokens,
        last_decode=0.0,
        num_queued_tokens=0,
        forecast=Forecast(config),
    )
    return [(row.request.request_id, row.num_tokens) for row in make_plan(view, config).rows]


def cached_tokens(core: RecordingCore, request_id: str) -> int:
    first = core.events[request_id][0]
    assert isinstance(first, Scheduled)
    return first.cached_tokens


# --- memory of a plan ------------------------------------------------------------------------------------------------


def test_blocks_that_a_prompt_holds_ahead_of_its_progress_are_not_lent_to_the_next_one() -> None:
    """S5-R16: after a retry a prompt holds more than its next chunk needs, and the difference counted as available."""
    policy = SchedulerConfig(long_prefill_token_threshold=8, max_partial_prefills=0)
    config = resolved_config(num_kv_blocks=6, scheduler=policy)
    blocks = BlockManager(6, 4)
    ahead, behind = (prompt_of(name, index, 16, config) for index, name in enumerate(("ahead", "behind")))
    ahead.block_ids = blocks.allocate(4)
    behind.block_ids = blocks.allocate(2)
    behind.computed = behind.scheduled = 8
    assert chunks_planned(config, blocks, ahead, behind) == [("ahead", 8)]


def test_a_chunk_that_is_short_of_memory_ends_before_the_span_that_it_cannot_finish() -> None:
    """S2-R8, I-13: all other cuts were kept out of spans, but not this one."""
    config, blocks = resolved_config(num_kv_blocks=6), BlockManager(6, 4)
    blocks.allocate(4)  # held by another request
    image = prompt_of("image", 0, 16, config, atomic_spans=((4, 12),))
    image.block_ids = blocks.allocate(1)
    assert chunks_planned(config, blocks, image) == [("image", 4)]


def test_a_block_is_freed_by_victims_only_if_nobody_else_holds_it() -> None:
    blocks = BlockManager(4, 4)
    shared = blocks.allocate(1)
    blocks.publish(shared[0], b"digest")
    blocks.claim(shared)
    first, second = (*shared, *blocks.allocate(1)), (*shared, *blocks.allocate(2))

    def freed(victims: list[tuple[int, ...]]) -> int:
        gone: Counter[int] = Counter()
        return sum(blocks.freed_by(victim, gone) for victim in victims)

    assert [freed(victims) for victims in ([first], [second], [first, second])] == [1, 2, 4]


def test_a_row_never_evicts_the_prefix_that_a_later_row_of_its_step_starts_from() -> None:
    """I-10: "fresh" takes the last free block and one more, and the prefix of "hit" was released first of all."""
    core = RecordingCore(num_kv_blocks=8, max_num_batched_tokens=64, max_prefill_tokens=64)
    core.send("prefix", [*PREFIX, 13], max_tokens=1)
    core.run()
    core.send("later", range(1, 21), max_tokens=1)
    core.run()
    core.send("fresh", [20] * 8, max_tokens=1)
    core.send("hit", [*PREFIX, 14], max_tokens=1)
    core.run()
    together = {row.request_id for plan in core.plans for row in plan.rows if len(plan.rows) == 2}
    assert (together, cached_tokens(core, "hit")) == ({"fresh", "hit"}, 8)
    assert core.tokens("hit") == answer_alone([*PREFIX, 14], max_tokens=1)


def test_a_prefix_that_nobody_holds_costs_its_blocks_when_it_is_hit() -> None:
    """I-10: of eight blocks five are promised to "other",
    and once the four cached ones are hit they can no longer be evicted."""
    core = RecordingCore(num_kv_blocks=8, max_num_batched_tokens=64, max_prefill_tokens=64, scheduler=FULL)
    core.send("prefix", [*PREFIX, *PREFIX], max_tokens=1)
    core.run()
    core.send("other", [20] * 16, max_tokens=5, ignore_eos=True)
    core.send("hit", [*PREFIX, *PREFIX, 13], max_tokens=4, ignore_eos=True)
    core.keep(core.step())
    assert [row.request_id for row in core.plans[-1].rows] == ["other"]
    core.run()
    assert core.tokens("hit") == answer_alone([*PREFIX, *PREFIX, 13], max_tokens=4, ignore_eos=True)


def test_a_waiting_request_does_not_start_from_a_snapshot_that_was_overwritten_since_it_looked() -> None:
    """I-9: the row that overwrote it failed, so that no block was published and only the snapshots had changed."""
    core = RecordingCore(
        num_kv_blocks=6,
        recurrent_state=True,
        failing=lambda row: "injected" if row.request_id == "fails" else None,
        scheduler=SchedulerConfig(
            reserve_mode="full", preempt_policy="none", state_snapshot_tokens=4, state_snapshots=1
        ),
    )
    core.send("prefix", [5, 6, 7, 8, 9], max_tokens=1)
    core.run()
    core.send("fails", [20] * 18, max_tokens=3)
    core.send("waits", [5, 6, 7, 8, 10], max_tokens=2, ignore_eos=True)
    core.run()
    assert isinstance(core.events["fails"][-1], Failed)
    assert cached_tokens(core, "waits") == 0
    assert core.tokens("waits") == answer_alone([5, 6, 7, 8, 10], max_tokens=2, ignore_eos=True)


# --- limits and reasons ----------------------------------------------------------------------------------------------


def test_the_prefill_limit_is_whole_again_once_the_engine_was_idle() -> None:
    """S1-R7: one shortage would make every later prompt take twice its steps."""
    failures = [ExecutorOutOfMemoryError("injected")]

    def fail_once(plan: StepPlan) -> None:
        if failures:
            raise failures.pop()

    core = RecordingCore(before_step=fail_once, enable_prefix_caching=False)
    for name in ("short of memory", "after"):
        core.send(name, range(32), max_tokens=1)
        core.run()
    assert chunks_of(core, "short of memory") == [32, 16, 16]
    assert chunks_of(core, "after") == [32]


def test_the_wait_reason_is_that_of_the_request_that_does_not_fit_even_if_a_later_one_lacks_a_seat() -> None:
    core = RecordingCore(num_kv_blocks=10, max_num_seqs=2, scheduler=SchedulerConfig(admission_order="bypass"))
    core.send("runs", [1, 2], max_tokens=20, ignore_eos=True)
    core.keep(core.step())
    core.send("large", [3] * 36, max_tokens=1)
    core.send("passes", [4, 5], max_tokens=4, ignore_eos=True)
    core.send("no seat", [6, 7], max_tokens=1)
    core.keep(core.step())
    assert [row.request_id for row in core.plans[-1].rows] == ["runs", "passes"]
    assert core.load().wait_reason == "memory"
