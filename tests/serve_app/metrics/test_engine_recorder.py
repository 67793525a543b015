"""Contracts of an engine replica's metrics: exact counts and times, of cores that run. Long: every metric.
Never waits for time to pass: the clock is turned by hand, and a core's steps are made one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.async_engine import AsyncEngine
from engine.config import SchedulerConfig, SpeculativeConfig
from engine.core.core import EngineCore
from engine.fake.executor import FakeExecutor
from engine.kv_tiers import Tier, TierLoad
from engine.multimodal_inputs import InputKind, SpanInput
from engine.observer import StepFacts
from engine.protocol import (
    AdapterRef,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    RequestRejected,
    SamplingParams,
    Scheduled,
    Submission,
    Token,
    Usage,
)
from engine.step import ScheduledRequest
from serve_app.metrics.catalogue import ENGINE
from serve_app.metrics.engine_recorder import EngineRecorder
from serve_app.metrics.tier_samples import tier_samples
from serve_app.metrics.values import Distribution
from tests.support.engines import RecordingCore, resolved_config

TICK_S = 0.01
LORA = "vllm:lora_requests_info"
OF_TARGETS = (
    *("chunkserve:slo_attainment", "chunkserve:step_time_scale"),
    *("chunkserve:step_time_extra_seconds", "chunkserve:step_time_deviation"),
    *("chunkserve:queued_prefill_seconds", "chunkserve:prefill_token_seconds"),
)
TODAY = 1.75e9
"""Seconds since 1970 at the start of each test."""


class Bench:
    """A core whose steps are made by hand, with a recorder that sees what an engine would show it."""

    def __init__(self, **options: Any) -> None:
        self.core = RecordingCore(tick_ms=TICK_S * 1000, **options)
        self.recorder = EngineRecorder(
            self.core.config, clock=lambda: self.core.now, today=lambda: TODAY + self.core.now
        )

    def send(
        self, request_id: str, prompt: Any, inputs: tuple[SpanInput, ...] = (), adapter: str = "", **options: Any
    ) -> None:
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True} | options)
        ref = AdapterRef(adapter, f"/adapters/{adapter}", adapter.encode().hex()) if adapter else None
        if ref is not None:
            assert self.core.adapters is not None
            self.core.adapters.keep(ref.digest, None)
        self.recorder.submitted(Submission(request_id, tuple(prompt), params, inputs=inputs, adapter=ref))
        self.core.send_params(request_id, tuple(prompt), params, inputs=inputs, adapter=ref)

    @property
    def adapters(self) -> tuple[list[str], list[str]]:
        """Return the adapters of requests that run, and of requests that wait."""
        (found,) = (s for s in self.recorder.samples(self.core.load()) if s.name == LORA)
        assert found.value == TODAY + self.core.now
        most, *names = found.labels
        assert most == str(self.core.config.max_loras)
        running, waiting = (text.split(",") if text else [] for text in names)
        return running, waiting

    def step(self) -> None:
        events = self.core.keep(self.core.step())
        self.recorder.stepped(self.core.last_step, events)

    def abort(self, request_id: str) -> None:
        self.recorder.stepped(StepFacts(self.core.now), self.core.abort(request_id))

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def __getitem__(self, name: str) -> float:
        """Return the number of the only series of a name, or of the series `name{label}`."""
        value = self.values[name]
        assert not isinstance(value, Distribution)
        return value

    def histogram(self, name: str) -> tuple[int, float]:
        """Return how many values there are, and their sum."""
        value = self.values[name]
        assert isinstance(value, Distribution)
        return sum(value.counts), round(value.sum, 9)

    @property
    def values(self) -> dict[str, float | Distribution]:
        samples = self.recorder.samples(self.core.load())
        return {s.name + (f"{{{','.join(s.labels)}}}" if s.labels else ""): s.value for s in samples}


def ends(bench: Bench) -> dict[str, float]:
    return {reason: bench[f"vllm:request_success{{{reason}}}"] for reason in ("stop", "length", "abort", "error")}


# --- counts ----------------------------------------------------------------------------------------------------------


def test_a_request_is_counted_once_in_everything_that_it_is() -> None:
    bench = Bench()
    bench.send("a", range(1, 9), max_tokens=5)
    bench.run()
    assert ends(bench) == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    assert bench["vllm:prompt_tokens"] == 8
    assert bench["vllm:generation_tokens"] == 5
    assert bench.histogram("vllm:request_prompt_tokens") == (1, 8)
    assert bench.histogram("vllm:request_generation_tokens") == (1, 5)
    assert bench.histogram("vllm:request_params_max_tokens") == (1, 5)
    assert bench.histogram("vllm:request_num_preemptions") == (1, 0)
    assert bench.histogram("vllm:time_to_first_token_seconds")[0] == 1
    assert bench.histogram("vllm:inter_token_latency_seconds")[0] == 4
    assert bench.histogram("vllm:iteration_tokens_total") == (5, 8 + 4)


def test_a_stop_token_is_a_generated_token_though_nobody_is_shown_it() -> None:
    bench = Bench(reply=(5, 6))
    bench.send("a", range(1, 9), max_tokens=50, ignore_eos=False)
    bench.run()
    assert ends(bench)["stop"] == 1
    assert bench["vllm:generation_tokens"] == bench.core.finished("a").usage.completion_tokens == 3
    assert bench.histogram("vllm:inter_token_latency_seconds")[0] == 2


def test_what_an_aborted_request_has_cost_is_counted_and_its_times_are_not() -> None:
    bench = Bench()
    bench.send("a", range(1, 9), max_tokens=50)
    for _ in range(3):
        bench.step()
    bench.abort("a")
    bench.abort("a")  # again, when it is gone
    assert ends(bench)["abort"] == 1
    assert (bench["vllm:prompt_tokens"], bench["vllm:generation_tokens"]) == (8, 3)
    assert bench.histogram("vllm:time_to_first_token_seconds")[0] == 1
    assert bench.histogram("vllm:e2e_request_latency_seconds") == (0, 0)


def test_a_request_that_is_aborted_before_its_first_step_is_an_end_and_nothing_else() -> None:
    bench = Bench()
    bench.send("a", range(1, 9), max_tokens=50)
    bench.abort("a")
    assert ends(bench)["abort"] == 1
    assert bench["vllm:prompt_tokens"] == bench["vllm:prefix_cache_queries"] == 0


def test_a_request_that_fails_is_an_error_and_its_neighbour_is_none() -> None:
    def failing(row: ScheduledRequest) -> str | None:
        return "broken" if row.request_id == "b" and row.start > 8 else None

    bench = Bench(failing=failing)
    for name in "ab":
        bench.send(name, range(1, 9), max_tokens=5)
    bench.run()
    assert ends(bench) == {"stop": 0, "length": 1, "abort": 0, "error": 1}
    assert bench.histogram("vllm:e2e_request_latency_seconds")[0] == 1


def test_steps_are_counted_by_the_capture_that_they_were_or_why_none() -> None:
    bench = Bench(graph_sizes=(2, 4))
    for name in "abc":
        bench.send(name, range(1, 9), max_tokens=5)
    bench.run()
    load = bench.core.load()
    assert bench["chunkserve:graph_steps{hit,decode 4}"] == load.graph_hits["decode 4"] > 0
    assert bench["chunkserve:graph_steps{miss,prefill rows}"] == load.graph_misses["prefill rows"] > 0
    plain = Bench()
    plain.send("a", range(1, 9), max_tokens=5)
    plain.run()
    assert not [name for name in plain.values if name.startswith("chunkserve:graph_steps")]


def test_the_rank_that_others_wait_for_is_named() -> None:
    bench = Bench()
    load = replace(bench.core.load(), rank_late_s=(0.25, 7.5))
    found = {sample.labels: sample.value for sample in bench.recorder.samples(load) if "rank_late" in sample.name}
    assert found == {("0",): 0.25, ("1",): 7.5}


def test_preemptions_are_counted_for_the_engine_and_for_the_request() -> None:
    bench = Bench(num_kv_blocks=10, scheduler=SchedulerConfig(reserve_mode="prompt", watermark_blocks=0))
    for name in "ab":
        bench.send(name, range(1, 9), max_tokens=28)
    bench.run()
    assert bench["vllm:num_preemptions"] == bench.core.load().num_preemptions > 0
    assert bench.histogram("vllm:request_num_preemptions") == (2, bench["vllm:num_preemptions"])
    assert bench["vllm:generation_tokens"] == 56  # none is counted twice
    assert bench["vllm:prompt_tokens"] == bench["vllm:prefix_cache_queries"] == 16


def test_cached_prompt_tokens_are_hits_and_are_counted_as_computed_from_the_cache() -> None:
    bench = Bench()
    for name in "ab":
        bench.send(name, range(1, 14), max_tokens=2)
        bench.run()
    assert (bench["vllm:prefix_cache_queries"], bench["vllm:prefix_cache_hits"]) == (26, 12)
    assert (bench["vllm:prompt_tokens"], bench["vllm:prompt_tokens_cached"]) == (26, 12)
    assert bench.histogram("vllm:request_prefill_kv_computed_tokens") == (2, 26 - 12)


def test_without_a_prefix_cache_nothing_is_looked_up() -> None:
    bench = Bench(enable_prefix_caching=False)
    bench.send("a", range(1, 14), max_tokens=2)
    bench.run()
    assert (bench["vllm:prefix_cache_queries"], bench["vllm:prompt_tokens"]) == (0, 13)


def test_a_prompt_that_is_only_scored_is_counted_and_has_no_first_token() -> None:
    bench = Bench()
    bench.send("a", range(1, 9), max_tokens=0, prompt_logprobs=0)
    bench.run()
    assert ends(bench)["length"] == 1
    assert (bench["vllm:prompt_tokens"], bench["vllm:generation_tokens"]) == (8, 0)
    assert bench.histogram("vllm:time_to_first_token_seconds")[0] == 0
    assert bench.histogram("vllm:request_prefill_time_seconds")[0] == 1
    assert bench.histogram("vllm:request_decode_time_seconds")[0] == 0


def test_only_refusals_that_are_the_engines_are_admission_rejections() -> None:
    bench = Bench()
    for code in (ErrorCode.QUEUE_FULL, ErrorCode.QUEUE_FULL, ErrorCode.DRAINING, ErrorCode.EMPTY_PROMPT):
        bench.recorder.rejected(code)
    rejected = {name: value for name, value in bench.values.items() if name.startswith("vllm:admission_rejections")}
    assert rejected == {"vllm:admission_rejections{queue_full}": 2, "vllm:admission_rejections{draining}": 1}


def test_requests_that_came_before_the_recorder_are_not_counted() -> None:
    """This leaves out the requests of the warm-up."""
    bench = Bench()
    bench.core.send("warm-up", range(1, 9), max_tokens=3, ignore_eos=True)
    bench.run()
    assert (bench["vllm:prompt_tokens"], bench["vllm:generation_tokens"], sum(ends(bench).values())) == (0, 0, 0)


# --- times -----------------------------------------------------------------------------------------------------------


def test_the_parts_of_a_requests_time_are_where_its_events_say() -> None:
    """There are five ticks between the arrival and the last token;
    a step that is planned at a tick ends at the same tick."""
    bench = Bench()
    bench.send("a", [1] * 40, max_tokens=4)  # 32 tokens a step: two steps of prefill
    bench.run()
    assert bench.histogram("vllm:request_queue_time_seconds") == (1, TICK_S)
    assert bench.histogram("vllm:request_prefill_time_seconds") == (1, TICK_S)
    assert bench.histogram("vllm:request_decode_time_seconds") == (1, 3 * TICK_S)
    assert bench.histogram("vllm:request_inference_time_seconds") == (1, 4 * TICK_S)
    assert bench.histogram("vllm:e2e_request_latency_seconds") == (1, 5 * TICK_S)
    assert bench.histogram("vllm:time_to_first_token_seconds") == (1, 2 * TICK_S)
    assert bench.histogram("vllm:inter_token_latency_seconds") == (3, 3 * TICK_S)
    assert bench.histogram("vllm:request_time_per_output_token_seconds") == (1, TICK_S)


def test_gaps_of_streams_that_stood_still_differently_long_are_told_apart() -> None:
    times = iter([0.0, 0.0, 0.0, 1.0, 1.25, 1.5, 3.5])
    recorder = EngineRecorder(resolved_config(), clock=lambda: next(times))
    for name in "ab":
        recorder.submitted(Submission(name, (1, 2), SamplingParams()))
    facts = StepFacts(0.0)
    recorder.stepped(facts, [Scheduled("a", 0), Scheduled("b", 0), Token("a", 1), Token("b", 1)])
    recorder.stepped(facts, [Token("a", 2)])
    recorder.stepped(facts, [Token("a", 3)])
    recorder.stepped(facts, [Token("b", 2), Token("a", 4)])
    gaps = recorder._histograms["vllm:inter_token_latency_seconds"].snapshot()
    assert (sum(gaps.counts), gaps.sum) == (4, 0.25 + 0.25 + 2.5 + 2.0)


def test_several_tokens_of_one_step_are_one_gap_and_all_are_counted() -> None:
    bench = Bench(num_speculative_tokens=3)
    bench.send("a", range(1, 9), max_tokens=9)
    bench.run()
    num_steps = bench.core.load().num_steps
    assert num_steps < 9, "the drafts were accepted"
    assert bench["vllm:generation_tokens"] == 9
    assert bench.histogram("vllm:inter_token_latency_seconds")[0] == num_steps - 1


def test_tokens_of_images_are_counted_where_they_are_encoded_and_not_where_they_are_known() -> None:
    kind = InputKind(name="image", token_id=31, side=1, min_pixels=1, max_pixels=99, chunkable=False)
    bench = Bench(inputs=(kind,), encoder_cache_tokens=99)
    for name in ("a", "b"):
        bench.send(name, [1, *(31,) * 6, 2], max_tokens=1, inputs=(SpanInput.of("image", 1, (1, 2, 3), bytes(18)),))
    bench.run()
    assert bench["chunkserve:encoded_tokens"] == 6


def test_drafts_are_counted_by_what_became_of_them_where_they_are_from_and_their_place() -> None:
    speculative = SpeculativeConfig(method="suffix", min_match=1, num_tokens=4, adaptive=False, free_tokens=8)
    bench = Bench(num_speculative_tokens=3, speculative=speculative, reply=[1, 2, 3, 1, 2, 4] * 9)
    bench.send("a", [9, 9], max_tokens=50)
    bench.send("b", [9], max_tokens=1)
    bench.run()
    rows = [row for plan in bench.core.plans for row in plan.rows if len(row.token_ids) > 1 and row.start > 1]
    drafted = sum(len(row.token_ids) - 1 for row in rows)
    accepted = 50 - 1 - sum(row.request_id == "a" and row.start > 1 for plan in bench.core.plans for row in plan.rows)
    assert 0 < accepted < drafted
    assert bench["vllm:spec_decode_num_drafts"] == len(rows)
    assert bench["vllm:spec_decode_num_draft_tokens"] == drafted
    assert bench["vllm:spec_decode_num_accepted_tokens"] == accepted
    by_place = [bench[f"vllm:spec_decode_num_accepted_tokens_per_pos{{{place}}}"] for place in range(4)]
    assert sum(by_place) == accepted
    assert by_place == sorted(by_place, reverse=True)
    assert bench["chunkserve:draft_tokens{suffix,accepted}"] == accepted
    assert bench["chunkserve:draft_tokens{suffix,rejected}"] == drafted - accepted
    assert bench["chunkserve:draft_tokens{grammar,accepted}"] == 0
    assert bench.histogram("chunkserve:request_accepted_draft_tokens") == (2, accepted)


def test_drafts_of_a_second_model_are_counted_as_such() -> None:
    speculative = SpeculativeConfig(
        method="draft_model", model="a name", num_tokens=4, adaptive=False, free_tokens=8, model_cost=0.1
    )
    bench = Bench(num_speculative_tokens=3, speculative=speculative)
    assert bench["chunkserve:draft_tokens{draft_model,accepted}"] == 0, "there before anything was drafted"
    bench.send("a", [9, 9], max_tokens=50)
    bench.run()
    accepted = bench["chunkserve:draft_tokens{draft_model,accepted}"]
    assert accepted == bench["vllm:spec_decode_num_accepted_tokens"] == 50 - len(bench.core.plans)
    rejected = bench["chunkserve:draft_tokens{draft_model,rejected}"]
    assert accepted + rejected == bench["vllm:spec_decode_num_draft_tokens"]
    assert bench.histogram("chunkserve:request_accepted_draft_tokens") == (1, accepted)


# --- what is done just now -------------------------------------------------------------------------------------------


def test_the_last_steps_show_chunks_that_share_steps_with_decode_rows() -> None:
    bench = Bench()
    bench.send("a", range(1, 5), max_tokens=30)
    bench.step()
    bench.send("b", [2] * 60, max_tokens=1)
    for _ in range(3):
        bench.step()
    told = bench.recorder.activity("e", bench.core.load(), None)
    assert [(step.id, step.decodes, step.chunks) for step in told.steps] == [
        (0, 0, (4,)),
        (1, 1, (28,)),
        (2, 1, (28,)),
        (3, 1, (4,)),
    ]
    assert [step.age_ms for step in told.steps] == [30, 20, 10, 0]
    assert (told.engine, told.num_running, told.num_waiting) == ("e", 1, 0)
    assert (told.num_blocks, told.max_num_seqs, told.max_num_batched_tokens) == (64, 8, 32)
    assert told.num_held_blocks == bench.core.load().num_held_blocks > 0


def test_the_pace_is_of_computed_prompt_tokens_and_of_sampled_ones() -> None:
    bench = Bench()
    for name in "ab":  # the second finds 12 of its 13 tokens in the prefix cache
        bench.send(name, range(1, 14), max_tokens=5)
        bench.run()
    bench.core.now = 2.0
    told = bench.recorder.activity("e", bench.core.load(), None)
    assert told.window_s == 2.0
    assert (told.prompt_tokens_per_s, told.generated_tokens_per_s) == ((13 + 1) / 2, 10 / 2)
    assert told.gap_p50_ms == told.gap_p99_ms == pytest.approx(TICK_S * 1000)


# --- gauges, and an engine with its threads ---------------------------------------------------------------------------


def test_the_gauges_are_those_of_the_load() -> None:
    bench = Bench(max_num_seqs=1)
    for name in "abc":
        bench.send(name, range(1, 9), max_tokens=4)
    bench.core.send("p", range(1, 9), prepared=False)
    bench.step()
    assert bench["vllm:num_requests_running"] == 1
    assert bench["vllm:num_requests_waiting"] == 3
    assert bench["vllm:num_requests_waiting_by_reason{capacity}"] == 2
    assert bench["vllm:num_requests_waiting_by_reason{deferred}"] == 1
    assert bench["vllm:kv_cache_usage_perc"] == bench.core.load().num_held_blocks / 64 > 0
    assert bench["vllm:cache_config_info{4,64,none,True}"] == 1


def test_adapters_are_named_while_requests_for_them_run_or_wait() -> None:
    bench = Bench(max_num_seqs=2, max_loras=4)
    assert bench.adapters == ([], [])
    for name, adapter in (("1", "b"), ("2", ""), ("3", "a"), ("4", "b"), ("5", "c")):
        bench.send(name, range(1, 9), adapter=adapter, max_tokens=4)
    assert bench.adapters == ([], ["a", "b", "c"]), "in one order, or each order of arrivals would be a series"
    bench.step()
    assert bench.adapters == (["b"], ["a", "b", "c"]), "two seats, of which one has no adapter"
    bench.abort("5")
    assert bench.adapters == (["b"], ["a", "b"])
    while bench.core.load().num_waiting:
        bench.step()
    assert bench.adapters == (["a", "b"], [])
    bench.run()
    assert bench.adapters == ([], [])


def test_the_adapter_of_a_preempted_request_waits_until_it_gets_on() -> None:
    greedy = SchedulerConfig(reserve_mode="prompt", watermark_blocks=0)
    bench = Bench(max_loras=2, num_kv_blocks=10, scheduler=greedy)
    for name in ("first", "second"):
        bench.send(name, range(1, 9), adapter=name, max_tokens=28)
    seen = []
    while bench.core.has_work:
        bench.step()
        if bench.adapters not in seen:
            seen.append(bench.adapters)
    assert bench["vllm:num_preemptions"] > 0
    assert seen[0] == (["first", "second"], [])
    assert (["first"], ["second"]) in seen
    assert seen.index((["second"], [])) > seen.index((["first"], ["second"]))


def test_every_name_of_the_catalogue_is_there_before_the_first_request() -> None:
    """Prometheus counts from the first value that it sees:
    a series that appears only with its first event has lost that event.

    Captured steps have too many names for that, and an event of the warm-up is no loss.
    Without adapters none are reported, nor without targets, tiers or several ranks what belongs to them."""
    bench = Bench()
    names = {name.partition("{")[0] for name in bench.values}
    of_tiers = {sample.name for sample in tier_samples(replace(bench.core.load(), tiers=(TierLoad(Tier.HOST),)), 4, 0)}
    absent = {"chunkserve:graph_steps", "chunkserve:rank_late_seconds", LORA, *OF_TARGETS, *of_tiers}
    assert names == {metric.name for metric in ENGINE} - absent


def test_an_engine_with_its_threads_is_counted_exactly_under_many_requests() -> None:
    config = resolved_config(num_kv_blocks=512, max_queued_requests=3, max_num_seqs=8)
    executor = FakeExecutor(config.num_kv_blocks, config.block_size, range(32))
    engine = AsyncEngine(EngineCore(executor, config))
    recorder = EngineRecorder(config)
    engine.observe(recorder)
    outcomes: list[str] = []

    async def ask(number: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=4 + number % 3, ignore_eos=True)
        try:
            async for event in engine.generate((1, 2, 3), params, f"r{number}"):
                if isinstance(event, Finished):
                    outcomes.append(event.reason)
        except RequestRejected as error:
            outcomes.append(error.code)

    async def main() -> None:
        await asyncio.gather(*(ask(number) for number in range(40)))

    asyncio.run(main())
    values = {(s.name, s.labels): s.value for s in recorder.samples(engine.load())}
    engine.shutdown()
    answered = outcomes.count("length")
    assert answered + outcomes.count("queue_full") == 40
    assert outcomes.count("queue_full") > 0
    assert values["vllm:request_success", ("length",)] == answered
    assert values["vllm:admission_rejections", ("queue_full",)] == outcomes.count("queue_full")
    assert values["vllm:prompt_tokens", ()] == 3 * answered
    assert recorder._requests == {}


def failed(request_id: str) -> Failed:
    return Failed(request_id, ErrorCode.DEADLINE_EXCEEDED, "late")


def test_nothing_is_kept_of_a_request_that_has_ended_in_any_way() -> None:
    terminal: list[Callable[[str], Any]] = [
        failed,
        lambda name: Finished(name, FinishReason.ABORT, Usage(2, 0, 0)),
        lambda name: Finished(name, FinishReason.STOP, Usage(2, 1, 0), stop_token_id=0),
    ]
    recorder = EngineRecorder(resolved_config())
    for make in terminal:
        recorder.submitted(Submission("a", (1, 2), SamplingParams()))
        recorder.stepped(StepFacts(0.0), [make("a")])
    assert recorder._requests == {}
