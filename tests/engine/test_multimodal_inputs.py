"""Contracts of inputs in prompts besides text: S2-B7, B8, B16, S5-B16, I-11, I-13.
They run on the fake executor, whose answers depend on every content and every position;
tests/golden has a real encoder."""

from __future__ import annotations

import dataclasses
import gc
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import ConfigError, SchedulerConfig
from engine.multimodal_inputs import Grid, InputKind, PlacedInput, SpanInput, overlapping, place_inputs, shift_at
from engine.prefix import extend_chain
from engine.protocol import Failed, RequestRejected, SamplingParams, Submission
from engine.scheduling.encoder_cache import EncodedInputs
from engine.step import ExecutorOutOfMemoryError, RowKind, StepPlan
from tests.support.engines import RecordingCore, resource_of

PAD = 31
WHOLE = InputKind(name="image", token_id=PAD, side=2, min_pixels=4, max_pixels=4000, chunkable=False)
CUT = dataclasses.replace(WHOLE, chunkable=True)
KINDS = pytest.mark.parametrize("kind", [WHOLE, CUT], ids=["whole", "chunkable"])
Part = int | tuple[int, Grid]
"""A number of text tokens, or (seed, grid) of a content."""


def content(seed: int, grid: Grid) -> bytes:
    return bytes((seed * 37 + i) % 256 for i in range(WHOLE.num_bytes(grid)))


def prompt_of(parts: Sequence[Part]) -> tuple[tuple[int, ...], tuple[SpanInput, ...]]:
    tokens: list[int] = []
    inputs = []
    for part in parts:
        if isinstance(part, int):
            tokens += [len(tokens) % 29 + 1 for _ in range(part)]
        else:
            inputs.append(SpanInput.of("image", len(tokens), part[1], content(*part)))
            tokens += [PAD] * inputs[-1].num_tokens
    return tuple(tokens), tuple(inputs)


class Core(RecordingCore):
    def __init__(self, kind: InputKind = WHOLE, **overrides: Any) -> None:
        super().__init__(**{"inputs": (kind,), "encoder_cache_tokens": 64, "max_encoder_tokens": 32} | overrides)

    def show(self, request_id: str, parts: Sequence[Part], **options: Any) -> None:
        prompt, inputs = prompt_of(parts)
        self.send(request_id, prompt, inputs=inputs, **{"max_tokens": 4, "ignore_eos": True} | options)

    @property
    def encoded(self) -> list[int]:
        """Count the tokens of each content that was encoded, in order."""
        return [work.grid[1] * work.grid[2] for plan in self.plans for work in plan.encodes]

    @property
    def kept(self) -> set[bytes]:
        return set(self._executor.encoder.encoded)  # type: ignore[attr-defined]


def alone(parts: Sequence[Part], **options: Any) -> list[int]:
    core = Core(
        max_num_batched_tokens=500,
        max_prefill_tokens=500,
        max_encoder_tokens=500,
        encoder_cache_tokens=500,
        enable_prefix_caching=False,
        num_kv_blocks=128,
    )
    core.show("a", parts, **options)
    core.run()
    return core.tokens("a")


MIXED: list[list[Part]] = [
    [5, (1, (1, 3, 4)), 6],
    [(2, (1, 2, 2)), (3, (1, 1, 9)), 3, (2, (1, 2, 2)), 1],
    [23, (4, (1, 4, 4)), 2],
    [(1, (1, 3, 4)), 4],
]


@KINDS
@pytest.mark.parametrize("budget", [3, 5, 16, 60])
@pytest.mark.parametrize("overlap", [False, True])
def test_answers_do_not_depend_on_chunks_neighbours_or_hits(kind: InputKind, budget: int, overlap: bool) -> None:
    want = [alone(parts) for parts in MIXED]
    assert len({tuple(tokens) for tokens in want}) == len(MIXED)
    core = Core(
        kind,
        max_num_batched_tokens=64,
        max_prefill_tokens=budget,
        overlap=overlap,
        scheduler=SchedulerConfig(atomic_policy="extend", chunk_align=1),
    )
    for round in range(2):
        for number, parts in enumerate(MIXED):
            core.show(f"{round}{number}", parts)
        core.run()
        assert [core.tokens(f"{round}{number}") for number in range(len(MIXED))] == want
    assert core.finished("12").usage.cached_tokens > 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_answers_are_those_of_a_request_alone_in_any_schedule(data: st.DataObject) -> None:
    """All caches are small: contents are dropped and encoded again, and requests lose their memory."""
    grids = st.sampled_from([(1, 1, 1), (1, 2, 3), (1, 3, 3), (1, 1, 12), (1, 4, 4)])
    part = st.one_of(st.integers(1, 9), st.tuples(st.integers(0, 3), grids))
    prompts = data.draw(st.lists(st.lists(part, min_size=1, max_size=5), min_size=1, max_size=5))
    core = Core(
        data.draw(st.sampled_from([WHOLE, CUT])),
        max_num_batched_tokens=40,
        max_prefill_tokens=data.draw(st.sampled_from([1, 4, 17, 40])),
        max_num_seqs=data.draw(st.integers(1, 4)),
        num_kv_blocks=data.draw(st.integers(26, 60)),
        encoder_cache_tokens=data.draw(st.sampled_from([16, 20, 64])),
        max_encoder_tokens=data.draw(st.sampled_from([1, 12, 40])),
        overlap=data.draw(st.booleans()),
        scheduler=SchedulerConfig(atomic_policy="extend", reserve_mode="prompt", watermark_blocks=0),
    )
    for number, parts in enumerate(prompts):
        core.show(str(number), parts, max_tokens=6)
    core.run()
    for number, parts in enumerate(prompts):
        assert core.tokens(str(number)) == alone(parts, max_tokens=6)
    cache = resource_of(core, EncodedInputs).cache
    assert (cache.num_held, core.load().num_held_blocks) == (0, 0)


@KINDS
def test_no_chunk_ends_inside_of_an_input_unless_the_model_says_that_it_may(kind: InputKind) -> None:
    core = Core(kind, max_num_batched_tokens=32, max_prefill_tokens=8, scheduler=SchedulerConfig(chunk_align=1))
    core.show("a", [4, (1, (1, 2, 4)), 6])
    core.run()
    ends = [row.end for plan in core.plans for row in plan.rows if row.kind is not RowKind.DECODE]
    assert ends == ([4, 12, 18] if kind is WHOLE else [8, 16, 18])
    assert core.encoded == [8], "and it is encoded once"


def test_two_contents_of_one_size_share_no_block_and_the_same_one_all_of_them() -> None:
    core = Core()
    for name, seed in (("a", 1), ("b", 2), ("c", 1)):
        core.show(name, [8, (seed, (1, 2, 4)), 9])
        core.run()
    cached = [core.finished(name).usage.cached_tokens for name in "abc"]
    assert cached == [0, 8, 24]
    assert core.tokens("a") == core.tokens("c") != core.tokens("b")


def test_a_prefix_is_known_by_which_part_of_a_content_is_in_a_block() -> None:
    """Here the tokens of every block are the same, and there is only one content."""
    digests = []
    for start in (0, 2):
        chain: list[bytes] = []
        extend_chain(chain, [PAD] * 8, 2, 4, inputs=(SpanInput.of("image", start, (1, 1, 6), content(1, (1, 1, 6))),))
        digests.append(chain)
    plain: list[bytes] = []
    extend_chain(plain, [PAD] * 8, 2, 4)
    assert not set(digests[0]) & set(digests[1])
    assert not set(plain) & {*digests[0], *digests[1]}


def test_a_content_is_encoded_once_however_often_it_is_shown_while_it_is_kept() -> None:
    core = Core(enable_prefix_caching=False)
    core.show("a", [(1, (1, 2, 4)), 3, (1, (1, 2, 4))])
    core.show("b", [2, (1, (1, 2, 4))])
    core.run()
    core.show("c", [5, (1, (1, 2, 4))])
    core.run()
    assert core.encoded == [8]


def test_what_is_used_longest_ago_gives_way_and_is_encoded_again() -> None:
    core = Core(enable_prefix_caching=False, encoder_cache_tokens=16)
    for name, seed in zip("abacab", (1, 2, 1, 3, 1, 2), strict=True):
        core.show(f"{name}{len(core.plans)}", [(seed, (1, 2, 4)), 1])
        core.run()
        assert len(core.kept) <= 2
    assert len(core.encoded) == 4, "1, 2, 3, which 2 has to give way to, and 2 again"


def test_two_salts_share_neither_blocks_nor_contents() -> None:
    core = Core()
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        core.show(name, [(1, (1, 2, 4)), 5], cache_salt=salt)
        core.run()
    assert [core.finished(name).usage.cached_tokens for name in "abc"] == [0, 0, 12]
    assert core.encoded == [8, 8]
    assert core.tokens("a") == core.tokens("b")


def test_a_step_encodes_within_its_budget_and_running_streams_have_a_token_in_each() -> None:
    core = Core(max_encoder_tokens=10, max_num_batched_tokens=64, max_prefill_tokens=64, encoder_cache_tokens=200)
    core.send("stream", [1, 2], max_tokens=40, ignore_eos=True)
    core.keep(core.step())
    core.show("a", [2, (1, (1, 2, 4)), (2, (1, 2, 4)), 3])
    core.show("b", [(3, (1, 1, 2)), (4, (1, 4, 5)), 1])
    before = len(core.plans)
    core.run()
    sizes = [[work.grid[1] * work.grid[2] for work in plan.encodes] for plan in core.plans[before:]]
    assert [size for size in sizes if size] == [[8], [8, 2], [20]]
    assert len(core.tokens("stream")) == 40
    assert all("stream" in [row.request_id for row in plan.rows] for plan in core.plans[before : before + 30])


@KINDS
def test_what_a_request_needs_is_not_dropped_for_another(kind: InputKind) -> None:
    """A chunk of `a` ends inside of its content, and `b` needs the room which that content takes."""
    core = Core(kind, encoder_cache_tokens=12, max_num_batched_tokens=40, max_prefill_tokens=5, max_num_seqs=2)
    if kind is WHOLE:
        core = Core(kind, encoder_cache_tokens=12, max_num_batched_tokens=40, max_prefill_tokens=16, max_num_seqs=2)
    core.show("a", [2, (1, (1, 3, 4)), 2])
    core.show("b", [(2, (1, 3, 3)), 2])
    core.run()
    assert sorted(core.encoded) == [9, 12]
    assert core.tokens("a") == alone([2, (1, (1, 3, 4)), 2])


@pytest.mark.parametrize("fault", [RuntimeError("injected"), ExecutorOutOfMemoryError("injected")])
def test_after_a_step_that_failed_its_contents_are_encoded_again(fault: Exception) -> None:
    faults = [fault]

    def before_step(plan: StepPlan) -> None:
        if plan.encodes and faults:
            raise faults.pop()

    core = Core(before_step=before_step)
    core.show("a", [(1, (1, 2, 4)), 3])
    core.run()
    failed = isinstance(core.events["a"][-1], Failed)
    assert failed is not isinstance(fault, ExecutorOutOfMemoryError)
    core.show("b", [(1, (1, 2, 4)), 3])
    core.run()
    assert core.tokens("b") == alone([(1, (1, 2, 4)), 3])
    assert resource_of(core, EncodedInputs).cache.num_held == 0


def test_a_request_that_ends_while_it_waits_or_runs_holds_nothing() -> None:
    core = Core(max_prefill_tokens=8)
    core.show("a", [(1, (1, 2, 4)), 30])
    core.show("b", [(2, (1, 2, 4)), 30])
    core.keep(core.step())
    core.keep(core.abort("a"))
    core.keep(core.abort("b"))
    core.run()
    assert resource_of(core, EncodedInputs).cache.num_held == 0


def test_a_burst_of_contents_leaves_no_growth_after_it_ends() -> None:
    """Requests keep their contents for as long as they live: a preemption may need them again."""
    side, grid = dataclasses.replace(WHOLE, side=60), (1, 4, 4)  # 173 kB each
    core = Core(side, enable_prefix_caching=False, encoder_cache_tokens=64)

    def burst(seed: int) -> None:
        for number in range(30):
            data = bytes([seed, number]) + bytes(side.num_bytes(grid) - 2)
            given = SpanInput.of("image", 0, grid, data)
            core.send(f"{seed}.{number}", (PAD,) * 16, inputs=(given,), max_tokens=1)
        core.run()
        core.plans.clear()
        core.events.clear()

    burst(0)
    tracemalloc.start()
    try:
        burst(1)
        gc.collect()
        after_one = tracemalloc.get_traced_memory()[0]
        for seed in range(2, 6):
            burst(seed)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - after_one
    finally:
        tracemalloc.stop()
    assert len(core.kept) == 4, "as many as the limit allows"
    assert grown < side.num_bytes(grid), "less than a single content"


def test_positions_go_on_after_an_input_by_its_longest_side() -> None:
    _, inputs = prompt_of([3, (1, (1, 2, 5)), 2, (2, (1, 3, 2)), 1])
    placed = place_inputs(inputs)
    assert [(one.start, one.position) for one in placed] == [(3, 3), (15, 3 + 5 + 2)]
    assert [one.shift_after for one in placed] == [-5, -5 - 3]
    assert [shift_at(placed, index) for index in (0, 3, 13, 14, 21, 40)] == [0, 0, -5, -5, -8, -8]
    assert overlapping(placed, 12, 15) == placed[:1]
    assert overlapping(placed, 13, 15) == ()
    assert isinstance(placed[0], PlacedInput)


def refused(submission: Submission, **overrides: Any) -> RequestRejected:
    core = Core(**overrides)
    with pytest.raises(RequestRejected) as caught:
        core.send(submission.request_id, submission.prompt_token_ids, inputs=submission.inputs)
    return caught.value


def test_what_cannot_be_taken_is_refused_with_the_limit() -> None:
    prompt, (image,) = prompt_of([2, (1, (1, 3, 4)), 2])

    def asked(given: SpanInput, tokens: tuple[int, ...] = prompt) -> Submission:
        return Submission("a", tokens, SamplingParams(max_tokens=2), inputs=(given,))

    error = refused(asked(dataclasses.replace(image, kind="sound")))
    assert "takes no input of kind sound" in error.message
    error = refused(asked(dataclasses.replace(image, data=image.data[1:])))
    assert (error.limit, error.value) == (144, 143)
    error = refused(asked(image, (*prompt[:5], 1, *prompt[6:])))
    assert "other tokens than 31 at 2..14" in error.message
    error = refused(asked(image), encoder_cache_tokens=11)
    assert "encoder_cache_memory_gib" in error.message
    assert (error.limit, error.value) == (11, 12)
    error = refused(asked(image), max_num_batched_tokens=18, max_prefill_tokens=18)
    assert (error.param, error.limit, error.value) == ("atomic_spans", 10, 12)
    with pytest.raises(RequestRejected, match="inputs must be inside the prompt"):
        asked(dataclasses.replace(image, start=5))


@pytest.mark.parametrize("policy", [{"chunk_owner": "engine"}, {"chunk_boundary": "request_local"}])
def test_chunks_that_may_not_end_where_an_input_waits_are_refused_at_the_start(policy: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="before an image that is not encoded yet"):
        Core(scheduler=SchedulerConfig(**policy, max_partial_prefills=0))
