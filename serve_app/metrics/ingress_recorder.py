"""Measures an ingress replica: the outcomes of its requests, and how much of their time was spent outside the engines.
Never touches a request: it is called at the end of each, on the replica's event loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from serve_app.admission.gate import Gate
from serve_app.errors.api_error import ENGINE_RULES, ApiError
from serve_app.metrics import overlap
from serve_app.metrics.catalogue import INGRESS
from serve_app.metrics.channel_counts import ChannelCounts
from serve_app.metrics.request_times import RequestTimes
from serve_app.metrics.store_counts import StoreCounts
from serve_app.metrics.values import Histogram, Sample
from serve_app.settings.engine_names import ENGINE

Outcome = Literal["complete", "error", "incomplete", "client_gone"]
_OUTCOMES = ("complete", "error", "server_error", "incomplete", "client_gone")
"""Those that are counted. An error is counted as one of the server's, or as one that it is not to blame for."""
_REFUSED = (429, 503)
_REFUSALS = (
    *dict.fromkeys(rule.code for rule in ENGINE_RULES.values() if rule.status in _REFUSED),
    *("rate_limit_exceeded", "model_asleep", "aborted"),
)
"""The codes of 429 and 503, whose series exist from the start: Prometheus counts from the first value that it sees."""
LATE_FIRST_TOKEN_S = 2.5
"""From here on a first token is late, as the alerts have it."""


class IngressRecorder:
    def __init__(
        self,
        gate: Gate,
        channel: ChannelCounts | None = None,
        store: StoreCounts | None = None,
        deployment: str = ENGINE,
    ) -> None:
        """For the requests of one model. `deployment`: its engines'."""
        self._gate = gate
        self._deployment = deployment
        self._channel = channel or ChannelCounts()
        self._store = store or StoreCounts()
        self._outcomes: Counter[str] = Counter(dict.fromkeys(_OUTCOMES, 0))
        self._refusals: Counter[str] = Counter(dict.fromkeys(_REFUSALS, 0))
        self._ignored: Counter[str] = Counter()
        self._deadline_misses = 0
        self._first_tokens_missed = 0
        # Only engine metrics have buckets that depend on the model's length.
        self._histograms = {m.name: Histogram(m.bounds(0)) for m in INGRESS if m.kind == "histogram"}

    def ignored(self, names: Iterable[str]) -> None:
        """Count the hints of one request that had no effect."""
        self._ignored.update(names)

    def ended(
        self, times: RequestTimes, outcome: Outcome, error: Exception | None = None, *, has_tokens: bool = True
    ) -> None:
        """Count a request that is over. `error`: the client got it instead of an answer. `has_tokens`: its answer would
        have had tokens."""
        failed = error is not None and _is_failure(error)
        self._outcomes["server_error" if failed else outcome] += 1
        self._deadline_misses += times.missed_deadline()
        if isinstance(error, ApiError) and error.status in _REFUSED:
            self._refusals[error.code or "none"] += 1
        if has_tokens and (failed or outcome in ("incomplete", "client_gone")) and _waited_in_vain(times):
            self._first_tokens_missed += 1
        if times.first_token is not None and outcome != "error":
            self._observe("time_to_first_token_seconds", times.first_token - times.arrived)
        if outcome == "complete":
            self._completed(times, times.now() - times.arrived)
            self._histograms["vllm:request_params_n"].observe(times.num_choices)

    def _completed(self, times: RequestTimes, total_s: float) -> None:
        self._observe("e2e_request_latency_seconds", total_s)
        self._observe("request_gate_time_seconds", times.gate_s)
        self._observe("request_engine_time_seconds", times.engine_s)
        self._observe("request_overhead_seconds", total_s - times.gate_s - times.engine_s)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[f"chunkserve:{name}"].observe(value)

    def samples(self) -> tuple[Sample, ...]:
        histograms = [Sample(name, (), histogram.snapshot()) for name, histogram in self._histograms.items()]
        outcomes = [Sample("chunkserve:requests", (name,), count) for name, count in self._outcomes.items()]
        refused = [Sample("chunkserve:admission_rejections", (name,), count) for name, count in self._refusals.items()]
        ignored = [Sample("chunkserve:ignored_fields", (name,), count) for name, count in self._ignored.items()]
        return (*self._plain(), *outcomes, *refused, *ignored, *histograms)

    def _plain(self) -> list[Sample]:
        gate, channel = self._gate.snapshot(), self._channel
        prompt_tokens, overlap_tokens = overlap.totals(self._deployment)
        values = {
            "num_requests_live": gate.num_live,
            "num_requests_waiting": gate.num_waiting,
            "deadline_misses": self._deadline_misses,
            "first_tokens_missed": self._first_tokens_missed,
            "migrations": channel.migrations,
            "migrations_failed": channel.failed_migrations,
            "channel_frames": channel.frames,
            "channel_gaps": channel.gaps,
            "channel_completions": channel.completions,
            "router_prompt_tokens": prompt_tokens,
            "router_overlap_tokens": overlap_tokens,
            "responses_store_entries": self._store.num_entries,
            "responses_store_bytes": self._store.num_bytes,
            "responses_store_queries": self._store.queries,
            "responses_store_hits": self._store.hits,
        }
        return [Sample(f"chunkserve:{name}", (), value) for name, value in values.items()]


def _is_failure(error: Exception) -> bool:
    """Whether the server is to blame. A refusal is counted by its code instead."""
    return not isinstance(error, ApiError) or (error.status >= 500 and error.status not in _REFUSED)


def _waited_in_vain(times: RequestTimes) -> bool:
    """Whether a first token was late already when the request ended without one. A client that sends its body slowly
    waits for itself."""
    if times.first_token is not None or times.read_at is None:
        return False
    return times.now() - times.arrived > LATE_FIRST_TOKEN_S
