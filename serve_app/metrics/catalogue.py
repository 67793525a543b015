"""Owns the list of all metrics: names, meanings, labels, buckets. The documentation's reference is made from it.
Never measures anything: the recorders supply the numbers for these names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_LATENCY = (*(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),)
_FINE = (0.001, 0.002, 0.005)
"""Added to vLLM's buckets in every histogram of seconds, because a small model needs resolution below 10 ms."""

TOKENS_PER_GAP = tuple(sorted({*_FINE, *_ITL}))
FIRST_TOKEN = tuple(sorted({*_FINE, *_TTFT}))
LATENCY = tuple(sorted({*_FINE, *_LATENCY}))
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COUNTS = (0, 1, 2, 5, 10, 20)
TOKENS: tuple[float, ...] = ()
"""Stands for 1, 2, 5, 10, 20, ... up to the longest prompt and answer; see `bounds`."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Counters are written with the suffix `_total`."""

    owner: Literal["engine", "ingress", "cluster"]
    """The deployment whose replicas measure it, which is also the name of the label with the replica's id. `cluster`:
    all of them together, without such a label."""
    kind: Literal["gauge", "counter", "histogram"]
    name: str
    help: str
    labels: tuple[str, ...] = ()
    """The labels besides `model_name` and the replica's."""
    buckets: tuple[float, ...] | None = None

    def bounds(self, max_model_len: int) -> tuple[float, ...]:
        """Return the upper bounds of a histogram's buckets, without infinity."""
        assert self.buckets is not None, self.name
        return self.buckets or tuple(one_two_five(max_model_len))


def one_two_five(most: int) -> list[int]:
    """List 1, 2, 5, 10, 20, 50 and so on, up to `most`."""
    return [step * 10**power for power in range(len(str(most))) for step in (1, 2, 5) if step * 10**power <= most]


CACHE_CONFIG = ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching")
TIER = ("tier",)
LORA_REQUESTS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")

NUM_RUNNING = "vllm:num_requests_running"
NUM_WAITING = "vllm:num_requests_waiting"
NUM_WAITING_AT_GATE = "chunkserve:num_requests_waiting"
KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"

_engine_gauge = partial(Metric, "engine", "gauge")
_engine_counter = partial(Metric, "engine", "counter")
_engine_histogram = partial(Metric, "engine", "histogram")
_ingress_gauge = partial(Metric, "ingress", "gauge")
_ingress_counter = partial(Metric, "ingress", "counter")
_ingress_histogram = partial(Metric, "ingress", "histogram")

ENGINE = (
    _engine_gauge(NUM_RUNNING, "Requests that are running."),
    _engine_gauge(NUM_WAITING, "Requests that are waiting in the engine."),
    _engine_gauge(
        "vllm:num_requests_waiting_by_reason",
        "Requests that are waiting in the engine, by reason. `capacity`: for memory, a seat or their turn. "
        "`deferred`: for their prompt to be prepared, or for KV that is loaded from a tier.",
        ("reason",),
    ),
    _engine_gauge(KV_CACHE_USAGE, "Share of KV blocks that requests hold, 0 to 1."),
    _engine_gauge("vllm:cache_config_info", "Always 1. The labels are the KV cache's settings.", CACHE_CONFIG),
    _engine_gauge(
        "vllm:lora_requests_info",
        "Time of the measurement, in seconds since 1970; present only if `max_loras` is set. The label "
        "`max_lora` is that setting. The other labels list the adapters of running and of waiting requests, separated "
        "by commas.",
        LORA_REQUESTS,
    ),
    _engine_counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    _engine_counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache, or loaded into it."),
    _engine_counter("vllm:num_preemptions", "Times that a running request lost its memory and had to wait again."),
    _engine_counter("vllm:prompt_tokens", "Prompt tokens that were processed, cached ones included."),
    _engine_counter("vllm:prompt_tokens_cached", "Prompt tokens taken from the prefix cache."),
    _engine_counter("vllm:generation_tokens", "Sampled tokens, stop tokens included."),
    _engine_counter(
        "vllm:request_success",
        "Requests that ended, by how they ended: `stop` (a stop token or string), `length`, `abort` (which "
        "includes clients that left) or `error`.",
        ("finished_reason",),
    ),
    _engine_counter(
        "vllm:admission_rejections",
        "Requests that the engine refused, by reason: `queue_full` or `draining`.",
        ("reason",),
    ),
    _engine_counter("vllm:spec_decode_num_drafts", "Decode rows that carried draft tokens."),
    _engine_counter("vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified."),
    _engine_counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted."),
    _engine_counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens that were accepted, by position in the draft, from 0.",
        ("position",),
    ),
    _engine_counter(
        "chunkserve:encoded_tokens",
        "Prompt tokens of images that were encoded. Images found in the encoder's cache do not count.",
    ),
    _engine_counter(
        "chunkserve:draft_tokens",
        "Draft tokens by their source (`grammar`: forced; `ngram` or `suffix`: looked up; `draft_model`: "
        "proposed by a smaller model) and by result, `accepted` or `rejected`.",
        ("method", "result"),
    ),
    _engine_counter(
        "chunkserve:slo_attainment",
        "First tokens (`ttft`) and gaps between tokens (`tpot`) that met their target, or missed it; see "
        "`engine.targets`.",
        ("target", "result"),
    ),
    _engine_gauge(
        "chunkserve:step_time_scale", "What step times that were measured at the first start are multiplied by now."
    ),
    _engine_gauge("chunkserve:step_time_extra_seconds", "What every step takes besides, such as planning and sending."),
    _engine_gauge("chunkserve:step_time_deviation", "Recent relative deviation of steps from their predicted times."),
    _engine_gauge(
        "chunkserve:queued_prefill_seconds",
        "Predicted time until prompts that wait or are partly computed are computed.",
    ),
    _engine_gauge(
        "chunkserve:prefill_token_seconds", "Predicted time of a prompt token beside the requests that decode now."
    ),
    _engine_counter(
        "chunkserve:graph_steps",
        "Steps on a GPU that has captured graphs. `hit`: replayed, with the graph's name. `miss`: not "
        "replayed, with the reason why no graph fitted.",
        ("result", "graph"),
    ),
    _engine_counter(
        "chunkserve:rank_late_seconds",
        "Time that the other ranks of an engine waited for this one; there only with `engine.tensor_parallel_size` or "
        "`engine.expert_parallel_size`. The rank for which it grows much faster than for the others is slow.",
        ("rank",),
    ),
    # The next are there only if `engine.kv_tiers` sets a tier.
    _engine_gauge("chunkserve:num_requests_loading", "Requests that wait for KV that is loaded from a tier."),
    _engine_gauge("chunkserve:kv_tier_capacity_bytes", "Most bytes that the tier may hold.", TIER),
    _engine_gauge(
        "chunkserve:kv_tier_used_bytes",
        "Bytes that the tier holds. Engines that share a directory report all of it, each.",
        TIER,
    ),
    _engine_gauge("chunkserve:kv_tier_blocks", "KV blocks that the engine knows to be in the tier.", TIER),
    _engine_counter(
        "chunkserve:kv_tier_hit_tokens", "Prompt tokens whose KV was loaded from the tier instead of computed.", TIER
    ),
    _engine_counter("chunkserve:kv_tier_loaded_bytes", "Bytes that were loaded from the tier.", TIER),
    _engine_counter("chunkserve:kv_tier_load_seconds", "Time that these loads took, without waits for others.", TIER),
    _engine_counter("chunkserve:kv_tier_stored_blocks", "KV blocks that were stored in the tier.", TIER),
    _engine_counter("chunkserve:kv_tier_stored_bytes", "Bytes that were stored in the tier.", TIER),
    _engine_counter("chunkserve:kv_tier_store_seconds", "Time that these stores took, without waits for others.", TIER),
    _engine_counter("chunkserve:kv_tier_evicted_blocks", "KV blocks that left the tier so that others had room.", TIER),
    _engine_counter(
        "chunkserve:kv_tier_failures",
        "KV blocks that could not be loaded, or whose content was not what its name says (`load`), or that could not "
        "be stored (`store`). A failed load is computed.",
        ("tier", "op"),
    ),
    _engine_counter(
        "chunkserve:kv_tier_refused_stores",
        "Times that a KV block was not stored because the tier was behind. It is tried again while the KV cache has "
        "it.",
        TIER,
    ),
    _engine_counter(
        "chunkserve:kv_tier_late_loads",
        "Requests that were computed because their KV did not come within `load_timeout_s`.",
        TIER,
    ),
    _engine_counter(
        "vllm:external_prefix_cache_queries",
        "Prompt tokens that were not in the KV cache, and so were looked up in the tiers.",
    ),
    _engine_counter("vllm:external_prefix_cache_hits", "Prompt tokens whose KV was loaded, from all tiers."),
    _engine_counter("vllm:kv_offload_load_bytes", "Bytes that were loaded, from all tiers."),
    _engine_counter("vllm:kv_offload_load_time", "Time that these loads took, in seconds."),
    _engine_counter("vllm:kv_offload_store_bytes", "Bytes that were stored, in all tiers."),
    _engine_counter("vllm:kv_offload_store_time", "Time that these stores took, in seconds."),
    _engine_histogram(
        "vllm:time_to_first_token_seconds",
        "From a request's arrival in the engine to its first token.",
        buckets=FIRST_TOKEN,
    ),
    _engine_histogram(
        "vllm:inter_token_latency_seconds",
        "Time between consecutive tokens of a request. Tokens of one step count as one.",
        buckets=TOKENS_PER_GAP,
    ),
    _engine_histogram(
        "vllm:iteration_tokens_total", "Tokens that a step computed, of prompts and of answers.", buckets=STEP_TOKENS
    ),
    # From here on: only requests that ended by `stop` or `length`, observed at their end.
    _engine_histogram(
        "vllm:request_time_per_output_token_seconds",
        "Mean time between a request's tokens, for answers of two tokens or more.",
        buckets=TOKENS_PER_GAP,
    ),
    _engine_histogram(
        "vllm:e2e_request_latency_seconds", "From a request's arrival in the engine to its end.", buckets=LATENCY
    ),
    _engine_histogram(
        "vllm:request_queue_time_seconds", "From a request's arrival in the engine to its first step.", buckets=LATENCY
    ),
    _engine_histogram(
        "vllm:request_prefill_time_seconds", "From a request's first step to its first token.", buckets=LATENCY
    ),
    _engine_histogram("vllm:request_decode_time_seconds", "From a request's first token to its last.", buckets=LATENCY),
    _engine_histogram(
        "vllm:request_inference_time_seconds", "From a request's first step to its last token.", buckets=LATENCY
    ),
    _engine_histogram("vllm:request_prompt_tokens", "Tokens of the prompt.", buckets=TOKENS),
    _engine_histogram(
        "vllm:request_prefill_kv_computed_tokens",
        "Tokens of the prompt that were not in the prefix cache.",
        buckets=TOKENS,
    ),
    _engine_histogram("vllm:request_generation_tokens", "Tokens of the answer.", buckets=TOKENS),
    _engine_histogram(
        "vllm:request_params_max_tokens",
        "`max_tokens` of the request, or the value that the ingress chose where the client gave none.",
        buckets=TOKENS,
    ),
    _engine_histogram(
        "chunkserve:request_accepted_draft_tokens",
        "Draft tokens that were accepted, also those after a stop token.",
        buckets=TOKENS,
    ),
    _engine_histogram("vllm:request_num_preemptions", "Times that the request lost its memory.", buckets=COUNTS),
)

INGRESS = (
    _ingress_gauge("chunkserve:num_requests_live", "Requests that have arrived and whose answer has not ended."),
    _ingress_gauge(NUM_WAITING_AT_GATE, "Requests that are waiting at the gate, in front of the engines."),
    _ingress_counter(
        "chunkserve:requests",
        "Requests for generated text, by outcome. `complete`: a whole answer. `server_error`: a status of 500 or more, "
        "503 excepted. `error`: any other error status. `incomplete`: an error inside a stream. `client_gone`: the "
        "client left.",
        ("outcome",),
    ),
    _ingress_counter(
        "chunkserve:admission_rejections", "Requests answered with 429 or 503, by the error's code.", ("reason",)
    ),
    _ingress_counter(
        "chunkserve:ignored_fields", "Requests with a hint that had no effect, by the hint's name.", ("field",)
    ),
    _ingress_counter("chunkserve:deadline_misses", "Requests that had no complete answer at their deadline."),
    _ingress_counter(
        "chunkserve:first_tokens_missed",
        "Requests that ended without a first token after more than 2.5 s: the client left, the deadline passed, or the "
        "server failed. `chunkserve:time_to_first_token_seconds` does not have them.",
    ),
    _ingress_histogram(
        "chunkserve:time_to_first_token_seconds",
        "From a request's arrival in the ingress to its first token; for a stream, until that token was sent.",
        buckets=FIRST_TOKEN,
    ),
    # The next five: only requests with a complete answer. The second to the fourth add up to the first.
    _ingress_histogram(
        "chunkserve:e2e_request_latency_seconds",
        "From a request's arrival in the ingress to the last byte that the HTTP server accepted.",
        buckets=LATENCY,
    ),
    _ingress_histogram("chunkserve:request_gate_time_seconds", "Wait for a place with the engines.", buckets=LATENCY),
    _ingress_histogram(
        "chunkserve:request_engine_time_seconds",
        "Time with the engines, including the way there and back and moves between engines.",
        buckets=LATENCY,
    ),
    _ingress_histogram(
        "chunkserve:request_overhead_seconds",
        "All other time: reading, parsing and tokenizing before the engine, encoding and sending after it.",
        buckets=FIRST_TOKEN,
    ),
    _ingress_histogram(
        "vllm:request_params_n", "`n` of the request: the number of answers to each prompt.", buckets=(1, 2, 5, 10, 20)
    ),
    _ingress_counter("chunkserve:migrations", "Times that an answer continued at another engine, or tried to."),
    _ingress_counter("chunkserve:migrations_failed", "Answers that lost their engine and found no other."),
    _ingress_counter("chunkserve:channel_frames", "Frames received through the token channel."),
    _ingress_counter("chunkserve:channel_gaps", "Answers that lost a frame in the token channel."),
    _ingress_counter(
        "chunkserve:channel_completions",
        "Answers that were completed from the call's result before the channel had delivered them.",
    ),
    _ingress_counter("chunkserve:router_prompt_tokens", "Prompt tokens of routed calls."),
    _ingress_counter(
        "chunkserve:router_overlap_tokens",
        "Prompt tokens that the router expected in the prefix cache of the engine that it chose, or in its tiers.",
    ),
    # All ingress replicas share one store where there are several: each tells what it last heard.
    _ingress_gauge(
        "chunkserve:responses_store_entries",
        "Responses that are kept. Several ingress replicas share one store, and each reports all of it.",
    ),
    _ingress_gauge(
        "chunkserve:responses_store_bytes",
        "Bytes that kept responses take. Several ingress replicas share one store, and each reports all of it.",
    ),
    _ingress_counter("chunkserve:responses_store_queries", "Lookups of kept responses."),
    _ingress_counter("chunkserve:responses_store_hits", "Lookups of kept responses that found all they asked for."),
)

CLUSTER = (
    Metric("cluster", "gauge", "chunkserve:requests_running_per_engine", "Requests that are running, for each engine."),
    Metric(
        "cluster",
        "gauge",
        "chunkserve:requests_waiting_per_engine",
        "Requests that are waiting at the gates and in the engines, for each engine.",
    ),
    Metric("cluster", "gauge", "chunkserve:kv_cache_usage_mean", "Mean of the engines' `vllm:kv_cache_usage_perc`."),
)
"""One series each, for gateways, which read a single one of a name. Absent while no engine answers."""

MISSING = "chunkserve:replicas_missing"
MISSING_HELP = "Replicas that did not answer this scrape, by deployment. Their series are missing from it."

BY_NAME = {metric.name: metric for metric in (*ENGINE, *INGRESS, *CLUSTER)}
