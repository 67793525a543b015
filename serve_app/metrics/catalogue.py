"""Owns the list of metrics, all in one place and so long: names, meanings, labels, buckets. The reference shows it.
Never measures anything; a recorder gives numbers to names that are here."""

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
"""In every histogram of seconds, besides vLLM's: a small model has more to tell below 10 ms than that it was below."""

TOKENS_PER_GAP = tuple(sorted({*_FINE, *_ITL}))
FIRST_TOKEN = tuple(sorted({*_FINE, *_TTFT}))
LATENCY = tuple(sorted({*_FINE, *_LATENCY}))
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COUNTS = (0, 1, 2, 5, 10, 20)
TOKENS: tuple[float, ...] = ()
"""Stands for 1, 2, 5, 10, 20, ... up to the longest prompt and answer; see `bounds`."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One name. Counters are written with `_total`."""

    owner: Literal["engine", "ingress"]
    """Whose replicas measure it: the label that holds a replica's id."""
    kind: Literal["gauge", "counter", "histogram"]
    name: str
    help: str
    labels: tuple[str, ...] = ()
    """Besides `model_name` and the replica's."""
    buckets: tuple[float, ...] | None = None

    def bounds(self, max_model_len: int) -> tuple[float, ...]:
        """Upper bounds of a histogram's buckets, without infinity."""
        assert self.buckets is not None, self.name
        return self.buckets or tuple(one_two_five(max_model_len))


def one_two_five(most: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 and so on, as far as `most`."""
    return [step * 10**power for power in range(len(str(most))) for step in (1, 2, 5) if step * 10**power <= most]


CACHE_CONFIG = ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching")
LORA_REQUESTS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")

_engine_gauge = partial(Metric, "engine", "gauge")
_engine_counter = partial(Metric, "engine", "counter")
_engine_histogram = partial(Metric, "engine", "histogram")
_ingress_gauge = partial(Metric, "ingress", "gauge")
_ingress_counter = partial(Metric, "ingress", "counter")
_ingress_histogram = partial(Metric, "ingress", "histogram")

ENGINE = (
    _engine_gauge("vllm:num_requests_running", "Requests that run."),
    _engine_gauge("vllm:num_requests_waiting", "Requests that wait in the engine."),
    _engine_gauge(
        "vllm:num_requests_waiting_by_reason",
        "Of those, `capacity`: for memory, a seat or their turn; `deferred`: for their prompt to be made.",
        ("reason",),
    ),
    _engine_gauge("vllm:kv_cache_usage_perc", "Share of KV blocks that requests hold, 0 to 1."),
    _engine_gauge("vllm:cache_config_info", "1; the labels are the KV cache's settings.", CACHE_CONFIG),
    _engine_gauge(
        "vllm:lora_requests_info",
        "When it was measured, in seconds since 1970; only where `max_loras` is set, which `max_lora` is. The other "
        "labels are the adapters of requests that run and that wait, by commas.",
        LORA_REQUESTS,
    ),
    _engine_counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    _engine_counter("vllm:prefix_cache_hits", "Of those, tokens that were there."),
    _engine_counter("vllm:num_preemptions", "Times that a running request lost its memory."),
    _engine_counter("vllm:prompt_tokens", "Tokens of prompts that are computed, cached ones included."),
    _engine_counter("vllm:prompt_tokens_cached", "Of those, tokens from the prefix cache."),
    _engine_counter("vllm:generation_tokens", "Sampled tokens, stop tokens included."),
    _engine_counter(
        "vllm:request_success",
        "Requests that ended, by how: `stop` (a token or string), `length`, `abort` (also if a client left), `error`.",
        ("finished_reason",),
    ),
    _engine_counter(
        "vllm:admission_rejections", "Requests that the engine did not take: `queue_full` or `draining`.", ("reason",)
    ),
    _engine_counter("vllm:spec_decode_num_drafts", "Decode rows that carried drafted tokens."),
    _engine_counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens that were verified."),
    _engine_counter("vllm:spec_decode_num_accepted_tokens", "Of those, tokens that were right."),
    _engine_counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "The same by their place in the draft, from 0 on.",
        ("position",),
    ),
    _engine_counter("chunkserve:encoded_tokens", "Prompt tokens of images that were encoded; others had been before."),
    _engine_counter(
        "chunkserve:draft_tokens",
        "Drafted tokens by where they are from (`grammar`: forced; `ngram`, `suffix`: looked up; `draft_model`: "
        "proposed), and whether they were `accepted` or `rejected`.",
        ("method", "result"),
    ),
    _engine_counter(
        "chunkserve:graph_steps",
        "Steps on a GPU with captured steps: `hit` and which one, or `miss` and why none fitted.",
        ("result", "graph"),
    ),
    _engine_histogram(
        "vllm:time_to_first_token_seconds",
        "From a request's arrival in the engine to its first token.",
        buckets=FIRST_TOKEN,
    ),
    _engine_histogram(
        "vllm:inter_token_latency_seconds",
        "Between the tokens of a request; tokens of one step count as one.",
        buckets=TOKENS_PER_GAP,
    ),
    _engine_histogram(
        "vllm:iteration_tokens_total", "Tokens that a step computed, of prompts and of answers.", buckets=STEP_TOKENS
    ),
    # From here on: of requests that ended by `stop` or `length`, observed at their end.
    _engine_histogram(
        "vllm:request_time_per_output_token_seconds",
        "Mean time between a request's tokens, where it has two or more.",
        buckets=TOKENS_PER_GAP,
    ),
    _engine_histogram("vllm:e2e_request_latency_seconds", "From arrival to end.", buckets=LATENCY),
    _engine_histogram("vllm:request_queue_time_seconds", "From arrival to the first step.", buckets=LATENCY),
    _engine_histogram("vllm:request_prefill_time_seconds", "From the first step to the first token.", buckets=LATENCY),
    _engine_histogram("vllm:request_decode_time_seconds", "From the first token to the last.", buckets=LATENCY),
    _engine_histogram("vllm:request_inference_time_seconds", "From the first step to the last token.", buckets=LATENCY),
    _engine_histogram("vllm:request_prompt_tokens", "Tokens of the prompt.", buckets=TOKENS),
    _engine_histogram(
        "vllm:request_prefill_kv_computed_tokens", "Of those, tokens that were not in the prefix cache.", buckets=TOKENS
    ),
    _engine_histogram("vllm:request_generation_tokens", "Tokens of the answer.", buckets=TOKENS),
    _engine_histogram(
        "vllm:request_params_max_tokens",
        "`max_tokens`; where a client gave none, what the ingress put in its place.",
        buckets=TOKENS,
    ),
    _engine_histogram(
        "chunkserve:request_accepted_draft_tokens", "Tokens of the answer that were drafted.", buckets=TOKENS
    ),
    _engine_histogram("vllm:request_num_preemptions", "Times that the request lost its memory.", buckets=COUNTS),
)

INGRESS = (
    _ingress_gauge("chunkserve:num_requests_live", "Requests from their arrival to their answer's end."),
    _ingress_gauge("chunkserve:num_requests_waiting", "Of those, requests that wait at the gate."),
    _ingress_counter(
        "chunkserve:requests",
        "Requests for generated text, by outcome: `complete`; `error`, an error status; `incomplete`, an error in a "
        "stream; `client_gone`.",
        ("outcome",),
    ),
    _ingress_counter(
        "chunkserve:admission_rejections", "Requests answered with 429 or 503, by the error's code.", ("reason",)
    ),
    _ingress_counter(
        "chunkserve:ignored_fields", "Requests with a hint that had no effect, by the hint's name.", ("field",)
    ),
    _ingress_counter("chunkserve:deadline_misses", "Requests that had no whole answer at their deadline."),
    _ingress_histogram(
        "chunkserve:time_to_first_token_seconds",
        "From a request's arrival in the ingress to its first token, sent if it is streamed.",
        buckets=FIRST_TOKEN,
    ),
    # The next five: of requests whose answer is complete. The second to the fourth add up to the first.
    _ingress_histogram(
        "chunkserve:e2e_request_latency_seconds",
        "From arrival to the last byte that the HTTP server took.",
        buckets=LATENCY,
    ),
    _ingress_histogram("chunkserve:request_gate_time_seconds", "Wait for a place with the engines.", buckets=LATENCY),
    _ingress_histogram(
        "chunkserve:request_engine_time_seconds",
        "With the engines, the way there and back and moves between them included.",
        buckets=LATENCY,
    ),
    _ingress_histogram(
        "chunkserve:request_overhead_seconds",
        "The rest: reading, parsing, tokenizing before the engine; encoding and sending after it.",
        buckets=FIRST_TOKEN,
    ),
    _ingress_histogram("vllm:request_params_n", "`n`: answers to each prompt.", buckets=(1, 2, 5, 10, 20)),
    _ingress_counter("chunkserve:migrations", "Times that an answer went on at another engine."),
    _ingress_counter("chunkserve:migrations_failed", "Answers that lost their engine and got no other."),
    _ingress_counter("chunkserve:channel_frames", "Frames that came by the token channel."),
    _ingress_counter("chunkserve:channel_gaps", "Answers of which the token channel lost a frame."),
    _ingress_counter(
        "chunkserve:channel_completions",
        "Answers that ended with what the call returned, before the channel brought it.",
    ),
    _ingress_counter("chunkserve:router_prompt_tokens", "Prompt tokens of the calls that were routed."),
    _ingress_counter(
        "chunkserve:router_overlap_tokens",
        "Of those, tokens that the router expected in the prefix cache of the engine it chose.",
    ),
)

MISSING = "chunkserve:replicas_missing"
MISSING_HELP = "Replicas that did not answer this scrape, by deployment; their series are not in it."

BY_NAME = {metric.name: metric for metric in (*ENGINE, *INGRESS)}
