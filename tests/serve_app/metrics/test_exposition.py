"""Contracts of the text that Prometheus reads:
it parses, names are those that dashboards know, replicas are not added up.
Never parses by itself: Prometheus's own client does."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_app.metrics.catalogue import BY_NAME, ENGINE, INGRESS, MISSING, one_two_five
from serve_app.metrics.exposition import Scrape, expose
from serve_app.metrics.values import (
    Distribution,
    Histogram,
    MalformedSamples,
    ReplicaSamples,
    Sample,
    decode,
    encode,
)

MODEL = 'org/"tiny"\\model'

# What dashboards, autoscalers and gateways that know vLLM ask for, with the labels besides model_name and engine.
VLLM: dict[str, tuple[str, ...]] = {
    "num_requests_running": (),
    "num_requests_waiting": (),
    "num_requests_waiting_by_reason": ("reason",),
    "kv_cache_usage_perc": (),
    "cache_config_info": ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"),
    "lora_requests_info": ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    "prefix_cache_queries_total": (),
    "prefix_cache_hits_total": (),
    "external_prefix_cache_queries_total": (),
    "external_prefix_cache_hits_total": (),
    "kv_offload_load_bytes_total": (),
    "kv_offload_load_time_total": (),
    "kv_offload_store_bytes_total": (),
    "kv_offload_store_time_total": (),
    "num_preemptions_total": (),
    "prompt_tokens_total": (),
    "prompt_tokens_cached_total": (),
    "generation_tokens_total": (),
    "request_success_total": ("finished_reason",),
    "admission_rejections_total": ("reason",),
    "spec_decode_num_drafts_total": (),
    "spec_decode_num_draft_tokens_total": (),
    "spec_decode_num_accepted_tokens_total": (),
    "spec_decode_num_accepted_tokens_per_pos_total": ("position",),
    "time_to_first_token_seconds_bucket": ("le",),
    "inter_token_latency_seconds_bucket": ("le",),
    "request_time_per_output_token_seconds_bucket": ("le",),
    "e2e_request_latency_seconds_bucket": ("le",),
    "request_queue_time_seconds_bucket": ("le",),
    "request_prefill_time_seconds_bucket": ("le",),
    "request_decode_time_seconds_bucket": ("le",),
    "request_inference_time_seconds_bucket": ("le",),
    "request_prompt_tokens_bucket": ("le",),
    "request_prefill_kv_computed_tokens_bucket": ("le",),
    "request_generation_tokens_bucket": ("le",),
    "request_params_max_tokens_bucket": ("le",),
    "request_params_n_bucket": ("le",),
    "iteration_tokens_total_bucket": ("le",),
    "request_num_preemptions_bucket": ("le",),
}

NEW_OF_ENGINE = {
    "chunkserve:encoded_tokens",
    "chunkserve:graph_steps",
    "chunkserve:rank_late_seconds",
    "chunkserve:draft_tokens",
    "chunkserve:request_accepted_draft_tokens",
    "chunkserve:slo_attainment",
    "chunkserve:step_time_scale",
    "chunkserve:step_time_extra_seconds",
    "chunkserve:step_time_deviation",
    "chunkserve:queued_prefill_seconds",
    "chunkserve:prefill_token_seconds",
    "chunkserve:num_requests_loading",
    *(name for name in BY_NAME if name.startswith("chunkserve:kv_tier_")),
}

OF_REQUESTS = "request_params_n_bucket"
"""Metrics that the ingress measures: an engine runs answers, but does not know whose they are."""


def sample(name: str, value: Any = 1, *labels: str) -> Sample:
    return Sample(name, labels, value)


def full(replica_id: str, metrics: Any) -> ReplicaSamples:
    """Return one value for every metric."""
    made = Histogram((1, 2))
    made.observe(1.5)
    samples = [
        sample(metric.name, made.snapshot() if metric.kind == "histogram" else 3, *(f"a {x}" for x in metric.labels))
        for metric in metrics
    ]
    return ReplicaSamples(replica_id, tuple(samples))


def parsed(scrape: Scrape) -> list[Any]:
    return list(text_string_to_metric_families(expose({MODEL: scrape})))


def series(scrape: Scrape) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in parsed(scrape):
        for one in family.samples:
            found.setdefault(one.name, []).append((one.labels, one.value))
    return found


def test_the_names_and_labels_of_vllm_are_there_as_they_are() -> None:
    found = series(Scrape([full("e1", ENGINE)], [full("i1", INGRESS)]))
    for name, labels in VLLM.items():
        replica = "ingress" if name == OF_REQUESTS else "engine"
        assert {frozenset(one) for one, _ in found[f"vllm:{name}"]} == {frozenset({"model_name", replica, *labels})}
    heads = {name for name in found if name.startswith("vllm:") and not name.endswith(("_sum", "_count"))}
    assert heads == {f"vllm:{name}" for name in VLLM}


def test_every_family_has_its_type_and_its_help_and_our_own_prefix_where_it_is_new() -> None:
    families = {family.name: family for family in parsed(Scrape([full("e1", ENGINE)], [full("i1", INGRESS)]))}
    assert set(families) == {*BY_NAME, MISSING}
    for name, metric in BY_NAME.items():
        assert (families[name].type, families[name].documentation) == (metric.kind, metric.help)
        of_engine = metric.owner == "engine" and name not in NEW_OF_ENGINE
        is_vllms = of_engine or f"vllm:{OF_REQUESTS}" == f"{name}_bucket"
        assert name.partition(":")[0] == ("vllm" if is_vllms else "chunkserve")


def test_the_model_and_the_replica_are_labels_with_their_odd_characters() -> None:
    found = series(Scrape([full("e\n1", ENGINE)]))
    assert found["vllm:num_requests_running"] == [({"model_name": MODEL, "engine": "e\n1"}, 3.0)]


def test_each_replica_has_series_of_its_own() -> None:
    scrape = Scrape([full("e1", ENGINE), full("e2", ENGINE)], [full("i1", INGRESS), full("i2", INGRESS)])
    found = series(scrape)
    assert [one["engine"] for one, _ in found["vllm:prompt_tokens_total"]] == ["e1", "e2"]
    assert [one["ingress"] for one, _ in found["chunkserve:migrations_total"]] == ["i1", "i2"]
    assert [value for _, value in found["vllm:prompt_tokens_total"]] == [3, 3]


def test_buckets_count_all_that_is_below_and_end_with_the_count() -> None:
    latency = Histogram((0.1, 1))
    for value, times in ((0.1, 2), (0.5, 1), (7.0, 3)):
        latency.observe(value, times)
    name = "vllm:e2e_request_latency_seconds"
    found = series(Scrape([ReplicaSamples("e", (sample(name, latency.snapshot()),))]))
    assert [(one["le"], value) for one, value in found[f"{name}_bucket"]] == [("0.1", 2), ("1.0", 3), ("+Inf", 6)]
    assert found[f"{name}_count"][0][1] == 6
    assert found[f"{name}_sum"][0][1] == pytest.approx(0.2 + 0.5 + 21)


def test_replicas_that_did_not_answer_are_a_number_and_the_others_are_there() -> None:
    found = series(Scrape([full("e1", ENGINE)], [], {"engine": 2}))
    missing = {one["deployment"]: value for one, value in found[MISSING]}
    assert missing == {"engine": 2, "ingress": 0}
    assert found["vllm:prompt_tokens_total"][0][1] == 3


def test_no_replica_at_all_is_text_that_parses() -> None:
    assert set(series(Scrape())) == {MISSING}


@pytest.mark.parametrize(
    "strange",
    [
        sample("vllm:of_another_version"),
        sample("vllm:num_requests_running", 1, "a label too many"),
        sample("vllm:num_requests_waiting_by_reason"),
        sample("vllm:num_requests_running", Distribution((), (1,), 1)),
        sample("vllm:e2e_request_latency_seconds", 1),
        sample("vllm:e2e_request_latency_seconds", Distribution((1, 2), (1, 2), 1)),
    ],
)
def test_what_a_replica_of_another_version_says_otherwise_is_left_out(strange: Sample) -> None:
    scrape = Scrape([ReplicaSamples("e1", (strange, sample("vllm:num_preemptions", 5)))])
    found = series(scrape)
    assert set(found) == {"vllm:num_preemptions_total", MISSING}


def test_samples_are_the_same_after_their_way_between_replicas() -> None:
    sent = full("e1", (*ENGINE, *INGRESS))
    assert decode(encode(sent), ReplicaSamples) == sent


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x93\x01", encode(full("e1", ENGINE))[:-1]])
def test_bytes_of_somebody_else_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedSamples):
        decode(data, ReplicaSamples)


@pytest.mark.parametrize("metric", [metric for metric in BY_NAME.values() if metric.kind == "histogram"])
def test_buckets_rise_and_those_of_seconds_begin_fine_enough_for_small_models(metric: Any) -> None:
    bounds = metric.bounds(4096)
    assert list(bounds) == sorted(set(bounds))
    if metric.name.endswith("_seconds"):
        assert bounds[:3] == (0.001, 0.002, 0.005)


def test_token_buckets_go_as_far_as_a_request_can() -> None:
    assert one_two_five(4096) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
    assert one_two_five(5) == [1, 2, 5]


# What llm-d's endpoint picker reads of a model server, and its names for them.
READ_BY_PICKERS = {
    "WaitingQueueSize": "chunkserve:requests_waiting_per_engine",
    "RunningRequestsSize": "chunkserve:requests_running_per_engine",
    "KVCacheUsagePercent": "chunkserve:kv_cache_usage_mean",
}


def load_of(replica_id: str, running: int, waiting: int, usage: float) -> ReplicaSamples:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return ReplicaSamples(replica_id, tuple(map(sample, names, (running, waiting, usage))))


def test_a_picker_reads_one_number_a_name_the_mean_of_the_engines() -> None:
    gates = [ReplicaSamples(name, (sample("chunkserve:num_requests_waiting", 3),)) for name in ("i1", "i2")]
    found = series(Scrape([load_of("e1", 8, 2, 0.9), load_of("e2", 2, 0, 0.1)], gates))
    assert {name: found[metric] for name, metric in READ_BY_PICKERS.items()} == {
        "WaitingQueueSize": [({"model_name": MODEL}, 4.0)],
        "RunningRequestsSize": [({"model_name": MODEL}, 5.0)],
        "KVCacheUsagePercent": [({"model_name": MODEL}, 0.5)],
    }
    assert {BY_NAME[metric].kind for metric in READ_BY_PICKERS.values()} == {"gauge"}


def test_without_an_engine_a_picker_reads_nothing_instead_of_an_idle_server() -> None:
    """With zeros, a cluster whose engines are still loading would be the least loaded of all."""
    found = series(Scrape((), [full("i1", INGRESS)]))
    assert not found.keys() & READ_BY_PICKERS.values()
