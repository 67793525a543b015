"""Measures an engine replica: counts and times of its requests, from what the engine reports to its observer.
Never costs more than a few dictionary accesses per token: gaps between tokens are counted per step, in groups."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.config import ResolvedConfig
from engine.observer import StepFacts, Verified
from engine.protocol import (
    ErrorCode,
    Event,
    Failed,
    Finished,
    FinishReason,
    LoadSnapshot,
    Scheduled,
    Submission,
    Token,
)
from serve_app.metrics.activity import EngineActivity
from serve_app.metrics.catalogue import ENGINE
from serve_app.metrics.recent_steps import RecentSteps
from serve_app.metrics.tier_samples import OF_ALL_TIERS, tier_samples
from serve_app.metrics.values import Histogram, Sample

_ENDS = ("stop", "length", "abort", "error")
_REFUSALS = (ErrorCode.QUEUE_FULL, ErrorCode.DRAINING)
"""The engine's own refusals. Others are caused by the request, and would be the same at every engine."""
_ATTAINMENT = "chunkserve:slo_attainment"
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass(slots=True, eq=False)
class _LiveRequest:
    """What is known about a live request. Times are monotonic seconds."""

    prompt_tokens: int
    max_tokens: int | None
    arrived: float
    tpot_s: float | None = None
    """The target between two tokens, in seconds; None if there is none."""
    ttft_s: float | None = None
    """The target for the first token, likewise."""
    scheduled: float = 0.0
    first_token: float | None = None
    last_token: float = 0.0
    cached_tokens: int = 0
    num_preemptions: int = 0
    accepted_drafts: int = 0
    adapter: str = ""
    """The adapter's name for clients; "" without an adapter."""
    runs: bool = False
    """Whether the request has a seat. A preempted one counts as waiting until its next token, the first sign of a step.
    """


_Since = dict[tuple[float, float | None], int]
"""(Time of the token before, target between the two) -> number of tokens."""


class EngineRecorder:
    """Implements EngineObserver. Its lock is taken once per step, and by readers of the numbers."""

    def __init__(
        self,
        config: ResolvedConfig,
        clock: Callable[[], float] = time.monotonic,
        today: Callable[[], float] = time.time,
    ) -> None:
        """`clock`: the engine's clock. `today`: gives seconds since 1970."""
        self._config = config
        self._clock, self._today = clock, today
        targets = {"tpot": config.targets.tpot_ms, "ttft": config.targets.ttft_ms}
        self._targets = {name: ms / 1000 for name, ms in targets.items() if ms is not None}
        self._lock = threading.Lock()
        self._requests: dict[str, _LiveRequest] = {}
        self._recent = RecentSteps(clock())
        self._counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for metric in ENGINE:
            if metric.kind == "counter" and not metric.labels and metric.name not in OF_ALL_TIERS:
                self._count(metric.name, 0)
        for reason in _ENDS:
            self._count("vllm:request_success", 0, reason)
        for code in _REFUSALS:
            self._count("vllm:admission_rejections", 0, code)
        for position in range(_longest_draft(config)):
            self._count(_PER_POSITION, 0, str(position))
        for method in ("grammar", config.speculative.method) if config.speculates else ("grammar",):
            for result in ("accepted", "rejected"):
                self._count("chunkserve:draft_tokens", 0, method, result)
        for target in self._targets:
            for result in ("met", "missed"):
                self._count(_ATTAINMENT, 0, target, result)
        longest = config.max_model_len
        self._histograms = {m.name: Histogram(m.bounds(longest)) for m in ENGINE if m.kind == "histogram"}

    def samples(self, load: LoadSnapshot) -> tuple[Sample, ...]:
        """Return all numbers as of the end of a step. `load`: the engine's."""
        with self._lock:
            counters = [Sample(name, labels, count) for (name, labels), count in self._counts.items()]
            histograms = [Sample(name, (), histogram.snapshot()) for name, histogram in self._histograms.items()]
            adapters = self._lora_requests() if self._config.max_loras else []
            missed = self._counts["vllm:prefix_cache_queries", ()] - self._counts["vllm:prefix_cache_hits", ()]
        tiers = tier_samples(load, self._config.block_size, missed)
        return (*self._gauges(load), *adapters, *counters, *_graph_steps(load), *_late_ranks(load), *tiers, *histograms)

    def activity(self, engine: str, load: LoadSnapshot, after: int | None) -> EngineActivity:
        """Describe what the engine of that name is doing now; see StepsSnapshot.activity."""
        with self._lock:
            recent = self._recent.snapshot(self._clock())
        return recent.activity(engine, self._config, load, after)

    def _gauges(self, load: LoadSnapshot) -> list[Sample]:
        config = self._config
        kept_in = config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        cache = (config.block_size, config.num_kv_blocks, kept_in, config.enable_prefix_caching)
        by_reason, num_deferred = "vllm:num_requests_waiting_by_reason", load.num_preparing + load.num_loading
        return [
            Sample("vllm:num_requests_running", (), load.num_running),
            Sample("vllm:num_requests_waiting", (), load.num_waiting),
            Sample(by_reason, ("capacity",), load.num_waiting - num_deferred),
            Sample(by_reason, ("deferred",), num_deferred),
            Sample("vllm:kv_cache_usage_perc", (), load.num_held_blocks / load.num_blocks),
            Sample("vllm:cache_config_info", tuple(map(str, cache)), 1),
            *_step_times(load),
        ]

    def _lora_requests(self) -> list[Sample]:
        """List the adapters in use, in vLLM's form: of a replica's series, the one with the latest time is current."""
        running, waiting = set[str](), set[str]()
        for request in list(self._requests.values()):  # a copy, because other threads submit meanwhile
            if request.adapter:
                (running if request.runs else waiting).add(request.adapter)
        # Sorted, because each order would be a series of its own.
        labels = (str(self._config.max_loras), ",".join(sorted(running)), ",".join(sorted(waiting)))
        return [Sample("vllm:lora_requests_info", labels, self._today())]

    # --- EngineObserver -----------------------------------------------------------------------------------------------

    def submitted(self, submission: Submission) -> None:
        own_tpot_ms, own_ttft_ms = submission.tpot_ms, submission.ttft_ms
        request = _LiveRequest(
            len(submission.prompt_token_ids),
            submission.sampling.max_tokens,
            self._clock(),
            tpot_s=self._targets.get("tpot") if own_tpot_ms is None else own_tpot_ms / 1000,
            ttft_s=self._targets.get("ttft") if own_ttft_ms is None else own_ttft_ms / 1000,
        )
        if submission.adapter is not None:
            request.adapter = submission.adapter.name
        self._requests[submission.request_id] = request

    def rejected(self, code: ErrorCode) -> None:
        if code in _REFUSALS:
            with self._lock:
                self._count("vllm:admission_rejections", 1, code)

    def stepped(self, facts: StepFacts, events: Sequence[Event]) -> None:
        now = self._clock()
        with self._lock:
            if facts.num_tokens:
                self._observe("vllm:iteration_tokens_total", facts.num_tokens)
            self._count("chunkserve:encoded_tokens", facts.num_encoded)
            if facts.preempted:
                self._preempted(facts.preempted)
            for verified in facts.verified:
                self._drafted(verified)
            since = self._take(events, facts.started, now)
            generated = sum(since.values())
            self._count("vllm:generation_tokens", generated)
            gaps: Counter[float] = Counter()
            for (before, tpot_s), count in since.items():
                if before == now:
                    continue  # first tokens, and all but the first of several tokens in one step
                gaps[now - before] += count
                if tpot_s is not None:
                    self._attained("tpot", now - before, tpot_s, count)
            for gap_s, count in gaps.items():
                self._observe("vllm:inter_token_latency_seconds", gap_s, count)
            self._recent.add(now, facts.computed, generated, gaps)

    def _take(self, events: Sequence[Event], started: float, now: float) -> _Since:
        """Count the step's tokens by the time of the token before them and by their target; tokens without one before
        them count under `now`."""
        since: _Since = {}
        for event in events:
            request = self._requests.get(event.request_id)
            if request is None:  # the request began before this observer
                continue
            if isinstance(event, Token):
                self._token(request, now, since)
            elif isinstance(event, Scheduled):
                self._scheduled(request, event, started)
            elif isinstance(event, Finished | Failed):
                if isinstance(event, Finished) and event.stop_token_id is not None:
                    self._token(request, now, since)
                self._ended(event, request, now)
        return since

    # --- one request --------------------------------------------------------------------------------------------------

    def _token(self, request: _LiveRequest, now: float, since: _Since) -> None:
        request.runs = True
        if request.first_token is None:
            request.first_token = request.last_token = now
            self._prompt_computed(request)
            self._observe("vllm:time_to_first_token_seconds", now - request.arrived)
            if request.ttft_s is not None:
                self._attained("ttft", now - request.arrived, request.ttft_s, 1)
        place = request.last_token, request.tpot_s
        since[place] = since.get(place, 0) + 1
        request.last_token = now

    def _preempted(self, request_ids: Sequence[str]) -> None:
        self._count("vllm:num_preemptions", len(request_ids))
        for request_id in request_ids:
            if (request := self._requests.get(request_id)) is not None:
                request.num_preemptions += 1
                request.runs = False

    def _drafted(self, row: Verified) -> None:
        self._count("vllm:spec_decode_num_drafts", 1)
        self._count("vllm:spec_decode_num_draft_tokens", row.num_drafted)
        self._count("vllm:spec_decode_num_accepted_tokens", row.num_accepted)
        for position in range(row.num_accepted):
            self._count(_PER_POSITION, 1, str(position))
        self._count("chunkserve:draft_tokens", row.num_accepted, row.method, "accepted")
        self._count("chunkserve:draft_tokens", row.num_drafted - row.num_accepted, row.method, "rejected")
        if (request := self._requests.get(row.request_id)) is not None:
            request.accepted_drafts += row.num_accepted

    def _scheduled(self, request: _LiveRequest, event: Scheduled, started: float) -> None:
        request.scheduled, request.cached_tokens, request.runs = started, event.cached_tokens, True
        if self._config.enable_prefix_caching:
            self._count("vllm:prefix_cache_queries", request.prompt_tokens)
            self._count("vllm:prefix_cache_hits", event.cached_tokens)

    def _prompt_computed(self, request: _LiveRequest) -> None:
        self._count("vllm:prompt_tokens", request.prompt_tokens)
        self._count("vllm:prompt_tokens_cached", request.cached_tokens)

    def _ended(self, event: Finished | Failed, request: _LiveRequest, now: float) -> None:
        del self._requests[event.request_id]
        self._count("vllm:request_success", 1, event.reason if isinstance(event, Finished) else "error")
        if isinstance(event, Finished) and event.reason is not FinishReason.ABORT:
            if request.first_token is None:  # the prompt was only scored, or only computed for the cache
                self._prompt_computed(request)
            self._completed(event, request, now)

    def _completed(self, event: Finished, request: _LiveRequest, now: float) -> None:
        num_answer = event.usage.completion_tokens
        self._observe("vllm:e2e_request_latency_seconds", now - request.arrived)
        self._observe("vllm:request_queue_time_seconds", request.scheduled - request.arrived)
        self._observe("vllm:request_inference_time_seconds", now - request.scheduled)
        prefilled = now if request.first_token is None else request.first_token
        self._observe("vllm:request_prefill_time_seconds", prefilled - request.scheduled)
        if request.first_token is not None:
            self._observe("vllm:request_decode_time_seconds", request.last_token - request.first_token)
            if num_answer > 1:
                mean = (request.last_token - request.first_token) / (num_answer - 1)
                self._observe("vllm:request_time_per_output_token_seconds", mean)
        self._observe("vllm:request_prompt_tokens", request.prompt_tokens)
        self._observe("vllm:request_prefill_kv_computed_tokens", request.prompt_tokens - request.cached_tokens)
        self._observe("vllm:request_generation_tokens", num_answer)
        self._observe("chunkserve:request_accepted_draft_tokens", request.accepted_drafts)
        self._observe("vllm:request_num_preemptions", request.num_preemptions)
        if request.max_tokens is not None:
            self._observe("vllm:request_params_max_tokens", request.max_tokens)

    def _attained(self, target: str, took_s: float, target_s: float, count: int) -> None:
        self._count(_ATTAINMENT, count, target, "met" if took_s <= target_s else "missed")

    def _count(self, name: str, count: int, *labels: str) -> None:
        self._counts[name, labels] += count

    def _observe(self, name: str, value: float, times: int = 1) -> None:
        self._histograms[name].observe(value, times)


def _longest_draft(config: ResolvedConfig) -> int:
    others = config.speculative.num_tokens if config.speculates else 0
    return max(1, config.num_speculative_tokens, others)


def _late_ranks(load: LoadSnapshot) -> list[Sample]:
    return [Sample("chunkserve:rank_late_seconds", (str(rank),), late) for rank, late in enumerate(load.rank_late_s)]


def _graph_steps(load: LoadSnapshot) -> list[Sample]:
    """Return the counts of graph steps; there are none for an engine without captured graphs."""
    return [
        Sample("chunkserve:graph_steps", (result, name), count)
        for result, counts in (("hit", load.graph_hits), ("miss", load.graph_misses))
        for name, count in counts.items()
    ]


def _step_times(load: LoadSnapshot) -> list[Sample]:
    """Return the corrections of the step time model, and what it predicts; there is none for an engine without
    targets."""
    found, queued_s, costs = load.step_times, load.queued_prefill_s, load.prefill_costs
    if found is None or queued_s is None or costs is None:
        return []
    return [
        Sample("chunkserve:step_time_scale", (), found.scale),
        Sample("chunkserve:step_time_extra_seconds", (), found.extra_s),
        Sample("chunkserve:step_time_deviation", (), found.deviation),
        Sample("chunkserve:queued_prefill_seconds", (), queued_s),
        Sample("chunkserve:prefill_token_seconds", (), costs.token_s),
    ]
