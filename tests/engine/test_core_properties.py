"""Properties of the engine core under random traffic, named after the specification's invariants (section 5.4)."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import event, given, note, settings
from hypothesis import strategies as st

from engine.config import SchedulerConfig
from engine.protocol import TERMINAL, Failed, Finished, FinishReason, RequestRejected, Scheduled, Token
from engine.step import ExecutorOutOfMemoryError, RowKind, StepPlan
from tests.support.engines import RecordingCore, answer_alone


@dataclass(frozen=True)
class Traffic:
    """One request of a random trace: submitted before step `arrives`, aborted before step `aborts` if that is set."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool
    arrives: int
    aborts: int | None

    @property
    def sampling(self) -> dict[str, object]:
        return dict(
            max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed, ignore_eos=self.ignore_eos
        )


# Prompts are cuts of two texts plus a tail, so that prefixes are shared, differ late, and end anywhere in a block.
PROMPTS = st.builds(
    lambda text, cut, tail: (text * 40)[:cut] + tuple(tail),
    st.sampled_from([(1, 2, 3), (1, 2, 3, 4, 5)]),
    st.integers(1, 30),
    st.lists(st.integers(1, 31), max_size=6),
)
TRAFFIC = st.builds(
    Traffic,
    prompt=PROMPTS,
    max_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
    ignore_eos=st.booleans(),
    arrives=st.integers(0, 15),
    aborts=st.one_of(st.none(), st.none(), st.integers(0, 25)),
)


def _scheduler(values: dict[str, object]) -> SchedulerConfig:
    """A config of the matrix; combinations that are refused are turned into their nearest neighbour."""
    if values["reserve_mode"] == "full":
        values = {**values, "preempt_policy": "none"}
    if values["chunk_boundary"] == "request_local":
        values = {**values, "max_partial_prefills": 0}
    return SchedulerConfig(**values)


SCHEDULERS = st.fixed_dictionaries(
    dict(
        batch_mode=st.sampled_from(["mixed", "prefill_first", "decode_first"]),
        decode_starve_ms=st.sampled_from([0.0, 30.0, 200.0]),
        prefill_starve_ms=st.sampled_from([0.0, 50.0, 500.0]),
        decode_finish_tokens=st.sampled_from([0, 4]),
        reserve_mode=st.sampled_from(["full", "ratio", "ratio", "prompt"]),
        preempt_policy=st.sampled_from(["lifo", "retract"]),
        requeue=st.sampled_from(["arrival", "front", "back"]),
        ratio_decay_steps=st.sampled_from([3, 600]),
        ratio_decay_on=st.sampled_from(["decode_only", "any_decode"]),
        reserve_clip=st.sampled_from([2, 4096]),
        watermark_blocks=st.sampled_from([0, 1]),
        max_partial_prefills=st.sampled_from([0, 1, 2]),
        long_prefill_token_threshold=st.sampled_from([0, 5]),
        chunk_align=st.sampled_from([None, 1, 3]),
        chunk_boundary=st.sampled_from(["shared", "shared", "request_local"]),
        admission_order=st.sampled_from(["strict", "bypass"]),
        max_overtakes=st.sampled_from([1, 16]),
    )
).map(_scheduler)
CONFIGS = st.fixed_dictionaries(
    dict(
        block_size=st.sampled_from([1, 2, 4, 16]),
        num_kv_blocks=st.sampled_from([12, 24, 80]),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.sampled_from([7, 8, 13, 64]),
        max_prefill_tokens=st.sampled_from([1, 3, 8, 64]),
        enable_prefix_caching=st.booleans(),
        scheduler=SCHEDULERS,
    )
)


def check_plan(core: RecordingCore, plan: StepPlan) -> None:
    config = core.config
    ids = [row.request_id for row in plan.rows]
    prefill = sum(len(row.token_ids) for row in plan.rows if row.kind is not RowKind.DECODE)
    assert plan.num_tokens <= config.max_num_batched_tokens, "I-2"
    assert prefill <= config.max_prefill_tokens, "I-2"
    assert len(ids) <= config.max_num_seqs, "I-2"
    assert len(set(ids)) == len(ids), "I-4"
    assert all(row.token_ids for row in plan.rows), "I-6"
    assert all((row.sampling is None) == (row.kind is RowKind.MIDDLE) for row in plan.rows), "I-7"
    assert all(len(row.block_ids) * config.block_size >= row.end for row in plan.rows), "I-12"


def check_blocks(core: RecordingCore) -> None:
    load = core.load()
    policy = core.config.scheduler
    assert load.num_running <= core.config.max_num_seqs, "I-3"
    assert policy.reserve_mode != "full" or not load.num_preemptions, "I-15"
    assert 0 < load.reserve_ratio <= 1, "I-16"
    held = {block for request in core._scheduler.prefilling.values() for block in request.block_ids}
    held |= {block for request in core._scheduler.decoding.values() for block in request.block_ids}
    assert load.num_held_blocks == len(held), "I-10"
    scheduler = core._scheduler
    queued = sum(len(request.token_ids) for request in scheduler.waiting.values())
    queued += sum(request.target - request.computed for request in scheduler.prefilling.values())
    assert load.num_queued_tokens == queued, "I-31"


def run_traffic(core: RecordingCore, trace: list[Traffic]) -> dict[str, Traffic]:
    """Run a trace to quiescence with every check after every step; return the requests that were accepted."""
    accepted: dict[str, Traffic] = {}
    for step in range(2000):
        for i, item in enumerate(trace):
            if item.arrives == step:
                try:
                    core.send(f"r{i}", item.prompt, **item.sampling)
                    accepted[f"r{i}"] = item
                except RequestRejected:
                    note(f"r{i} rejected")
            if item.aborts == step:
                core.keep(core.abort(f"r{i}"))
        plan = core._scheduler.plan(core.now)
        assert plan == core._scheduler.plan(core.now), "I-32"
        core.keep(core.step())
        check_blocks(core)
        if step > 25 and not core.has_work:
            return accepted
    raise AssertionError("I-19: not quiescent after 2000 steps")


def check_events(core: RecordingCore, request_id: str, item: Traffic) -> None:
    events = core.events[request_id]
    terminal = events[-1]
    assert isinstance(terminal, TERMINAL), "I-19, I-26"
    assert sum(isinstance(event, TERMINAL) for event in events) == 1, "I-26"
    aborted_while_waiting = (
        isinstance(terminal, Finished) and terminal.reason is FinishReason.ABORT and len(events) == 1
    )
    assert aborted_while_waiting or isinstance(events[0], Scheduled), "I-29"
    assert all(isinstance(event, Token) for event in events[1:-1]), "I-29"


@settings(max_examples=250, deadline=None)
@given(CONFIGS, st.lists(TRAFFIC, min_size=1, max_size=10))
def test_i1_tokens_are_the_same_under_every_schedule_and_neighbour(
    overrides: dict[str, object], trace: list[Traffic]
) -> None:
    core = RecordingCore(**overrides)
    accepted = run_traffic(core, trace)
    for plan in core.plans:
        check_plan(core, plan)
    for request_id, item in accepted.items():
        check_events(core, request_id, item)
        expected = answer_alone(item.prompt, **item.sampling)
        tokens = core.tokens(request_id)
        if item.aborts is None:
            end = core.finished(request_id)
            assert tokens == expected, "I-1"
            stopped = end.reason is FinishReason.STOP
            assert end.usage.completion_tokens == len(tokens) + stopped, "I-30"
            assert end.usage.cached_tokens < len(item.prompt), "I-6"
        else:
            assert tokens == expected[: len(tokens)], "I-1"
    load = core.load()
    gauges = (load.num_held_blocks, load.num_running, load.num_waiting, load.num_queued_tokens)
    assert gauges == (0, 0, 0, 0), "I-10, I-31"


# A pool that holds the largest request and little more: running out of memory is the rule here, not the exception.
TIGHT = st.fixed_dictionaries(
    dict(
        block_size=st.sampled_from([1, 2]),
        num_kv_blocks=st.just(46),
        max_num_seqs=st.integers(2, 6),
        max_num_batched_tokens=st.sampled_from([16, 64]),
        max_prefill_tokens=st.sampled_from([5, 64]),
        enable_prefix_caching=st.booleans(),
        scheduler=SCHEDULERS.filter(lambda policy: policy.reserve_mode != "full"),
    )
)
LONG_ANSWERS = st.builds(
    Traffic,
    prompt=st.lists(st.integers(1, 31), min_size=1, max_size=12).map(tuple),
    max_tokens=st.integers(15, 34),
    temperature=st.just(0.0),
    seed=st.just(0),
    ignore_eos=st.just(True),
    arrives=st.integers(0, 4),
    aborts=st.none(),
)


@settings(max_examples=150, deadline=None)
@given(TIGHT, st.lists(LONG_ANSWERS, min_size=4, max_size=12))
def test_i19_i24_memory_that_runs_out_ends_no_request_and_changes_no_token(
    overrides: dict[str, object], trace: list[Traffic]
) -> None:
    core = RecordingCore(**overrides)
    for request_id, item in run_traffic(core, trace).items():
        check_events(core, request_id, item)
        assert core.tokens(request_id) == answer_alone(item.prompt, **item.sampling), "I-1"
    event(f"preempted: {min(core.load().num_preemptions, 3)}")
    computed = sum(plan.num_tokens for plan in core.plans)
    least = sum(len(item.prompt) + item.max_tokens - 1 for item in trace)
    assert computed <= least * (1 + core.load().num_preemptions), "I-24"
    assert core.load().num_held_blocks == 0, "I-10"


@settings(max_examples=100, deadline=None)
@given(CONFIGS, st.lists(TRAFFIC, min_size=2, max_size=8), st.sets(st.integers(0, 20), min_size=1, max_size=4))
def test_i28_a_failure_touches_the_rows_of_its_plan_and_nobody_else(
    overrides: dict[str, object], trace: list[Traffic], failing: set[int]
) -> None:
    failed: set[str] = set()

    def fail(plan: StepPlan) -> None:
        if plan.step_id in failing:
            failed.update(row.request_id for row in plan.rows)
            raise RuntimeError("injected")

    core = RecordingCore(before_step=fail, **overrides)
    accepted = run_traffic(core, trace)
    for request_id, item in accepted.items():
        assert isinstance(core.events[request_id][-1], Failed) == (request_id in failed), "I-28"
        if request_id not in failed and item.aborts is None:
            assert core.tokens(request_id) == answer_alone(item.prompt, **item.sampling), "I-1, I-28"
    assert core.load().num_held_blocks == 0, "I-10"


@settings(max_examples=100, deadline=None)
@given(CONFIGS, st.lists(TRAFFIC, min_size=2, max_size=8), st.sets(st.integers(0, 20), min_size=1, max_size=6))
def test_i28_a_step_that_runs_out_of_memory_once_changes_no_token(
    overrides: dict[str, object], trace: list[Traffic], failing: set[int]
) -> None:
    ran_out = False

    def fail(plan: StepPlan) -> None:
        nonlocal ran_out
        prefill = any(row.kind is not RowKind.DECODE for row in plan.rows)
        ran_out = prefill and plan.step_id in failing and not ran_out
        if ran_out:
            raise ExecutorOutOfMemoryError("injected")

    core = RecordingCore(before_step=fail, **overrides)
    for request_id, item in run_traffic(core, trace).items():
        check_events(core, request_id, item)
        expected = answer_alone(item.prompt, **item.sampling)
        tokens = core.tokens(request_id)
        assert tokens == (expected if item.aborts is None else expected[: len(tokens)]), "I-1, I-28"
    assert core.load().num_held_blocks == 0, "I-10"


@settings(max_examples=100, deadline=None)
@given(CONFIGS, st.lists(TRAFFIC, min_size=2, max_size=10))
def test_i5_i23_chunks_are_contiguous_and_first_chunks_come_in_arrival_order(
    overrides: dict[str, object], trace: list[Traffic]
) -> None:
    core = RecordingCore(**overrides)
    run_traffic(core, trace)
    next_start: dict[str, int] = {}
    first_seen: list[str] = []
    for plan in core.plans:
        for row in plan.rows:
            if row.request_id not in next_start:
                first_seen.append(row.request_id)
                next_start[row.request_id] = core.events[row.request_id][0].cached_tokens
            if row.kind is not RowKind.DECODE and row.start < next_start[row.request_id]:
                next_start[row.request_id] = row.start  # preempted: it starts over, from wherever the cache reaches
            assert row.start == next_start[row.request_id], "I-5"
            next_start[row.request_id] = row.end
    if core.config.scheduler.admission_order == "bypass" or core.load().num_preemptions:
        return  # a request may overtake, and a preempted one comes back by its ticket
    arrival = sorted(first_seen, key=lambda name: (trace[int(name[1:])].arrives, int(name[1:])))
    assert first_seen == arrival, "I-23"
