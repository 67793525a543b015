"""Owns the Grafana dashboards. Long, because every panel is a list of queries. `python -m k8s.dashboards` writes their
JSON. Never has a layout: panels stand three in a row, in the order of the list."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from k8s.validate.manifests import K8S

DIRECTORY = K8S / "monitoring" / "dashboards"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph: its queries with their legends, and a text that explains it."""

    title: str
    text: str
    unit: str
    """Grafana's unit: s, short, percentunit, reqps."""
    queries: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    name: str
    title: str
    panels: Sequence[Panel]


def _quantiles(metric: str, *shares: float, by: str = "") -> tuple[tuple[str, str], ...]:
    """Make queries for a histogram's quantiles, over all replicas or for each value of a label."""
    labels, legend = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    rate = f"sum by ({labels}) (rate({metric}_bucket[$__rate_interval]))"
    return tuple((f"histogram_quantile({share}, {rate})", f"p{100 * share:g}{legend}") for share in shares)


def _rate(metric: str, by: str = "", **labels: str) -> str:
    chosen = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{f'{{{chosen}}}' if chosen else ''}[$__rate_interval]))"


def _share(part: str, whole: str) -> str:
    return f"{_rate(part)} / {_rate(whole)}"


def _speed(op: str) -> str:
    """Return a tier's bytes a second while it loads or stores, by tier."""
    done = {"load": "loaded", "store": "stored"}[op]
    whole = _rate(f"chunkserve:kv_tier_{op}_seconds_total", "tier")
    return f"{_rate(f'chunkserve:kv_tier_{done}_bytes_total', 'tier')} / {whole}"


ENGINE = Dashboard(
    "engine",
    "chunkserve / engines",
    (
        Panel(
            "Requests",
            "Running, and waiting in an engine, by engine.",
            "short",
            (
                ("vllm:num_requests_running", "running {{engine}}"),
                ("vllm:num_requests_waiting", "waiting {{engine}}"),
            ),
        ),
        Panel(
            "KV blocks in use",
            "Near 1, requests wait for memory or are preempted.",
            "percentunit",
            (("vllm:kv_cache_usage_perc", "{{engine}}"),),
        ),
        Panel(
            "Preemptions",
            "Running requests that lost their memory, so that their work is repeated.",
            "ops",
            ((_rate("vllm:num_preemptions_total", "engine"), "{{engine}}"),),
        ),
        Panel(
            "Tokens",
            "Prompt tokens, those of them from the prefix cache, and sampled tokens.",
            "short",
            (
                (_rate("vllm:prompt_tokens_total"), "prompts"),
                (_rate("vllm:prompt_tokens_cached_total"), "of these, cached"),
                (_rate("vllm:generation_tokens_total"), "answers"),
            ),
        ),
        Panel(
            "Gaps between tokens",
            "Gaps as the reader of a stream sees them. Long prompts of others must not show here.",
            "s",
            _quantiles("vllm:inter_token_latency_seconds", 0.5, 0.99),
        ),
        Panel(
            "Tokens of a step",
            "Full steps are prefill-bound, small ones decode-bound.",
            "short",
            _quantiles("vllm:iteration_tokens_total", 0.5, 0.99),
        ),
        Panel(
            "Steps",
            "An engine with requests but without steps is stalled.",
            "ops",
            ((_rate("vllm:iteration_tokens_total_count", "engine"), "{{engine}}"),),
        ),
        Panel(
            "Prefix cache hits",
            "Share of the looked-up prompt tokens that were in the cache.",
            "percentunit",
            ((_share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"), "hits"),),
        ),
        Panel(
            "Time in the engine",
            "Medians: before the first step, from there to the first token, and on to the last.",
            "s",
            (
                *((q, "queue") for q, _ in _quantiles("vllm:request_queue_time_seconds", 0.5)),
                *((q, "prefill") for q, _ in _quantiles("vllm:request_prefill_time_seconds", 0.5)),
                *((q, "decode") for q, _ in _quantiles("vllm:request_decode_time_seconds", 0.5)),
            ),
        ),
        Panel(
            "Drafts",
            "Drafted tokens that were verified, and those that were accepted.",
            "short",
            (
                (_rate("vllm:spec_decode_num_draft_tokens_total"), "drafted"),
                (_rate("vllm:spec_decode_num_accepted_tokens_total"), "accepted"),
            ),
        ),
        Panel(
            "How requests end",
            "By reason; `abort` is mostly clients that disconnected.",
            "reqps",
            ((_rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}"),),
        ),
        Panel(
            "Tiers: tokens loaded",
            "Prompt tokens a second whose KV was loaded from memory or disk instead of computed.",
            "short",
            ((_rate("chunkserve:kv_tier_hit_tokens_total", "tier"), "{{tier}}"),),
        ),
        Panel(
            "Tiers: room in use",
            "Share of what a tier may hold. Engines that share a directory report it each; the fullest is shown.",
            "percentunit",
            (("max by (tier) (chunkserve:kv_tier_used_bytes / chunkserve:kv_tier_capacity_bytes)", "{{tier}}"),),
        ),
        Panel(
            "Tiers: speed",
            "Bytes of a load or a store over the time that it took.",
            "Bps",
            (
                (_speed("load"), "load {{tier}}"),
                (_speed("store"), "store {{tier}}"),
            ),
        ),
        Panel(
            "Tiers: what went wrong",
            "Blocks that could not be loaded or stored, stores for which the tier was too slow, and requests whose "
            "blocks did not come in time. Nothing is lost but time.",
            "ops",
            (
                (_rate("chunkserve:kv_tier_failures_total", "tier, op"), "failed {{op}} {{tier}}"),
                (_rate("chunkserve:kv_tier_refused_stores_total", "tier"), "refused store {{tier}}"),
                (_rate("chunkserve:kv_tier_late_loads_total", "tier"), "late {{tier}}"),
            ),
        ),
    ),
)

SERVING = Dashboard(
    "serving",
    "chunkserve / serving path",
    (
        Panel(
            "Requests by outcome",
            "`server_error`: the server failed. `error`: refusals, and the mistakes of clients.",
            "reqps",
            ((_rate("chunkserve:requests_total", "outcome"), "{{outcome}}"),),
        ),
        Panel(
            "Refused",
            "429 and 503, by the error's code.",
            "reqps",
            ((_rate("chunkserve:admission_rejections_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Requests inside",
            "All live requests, and those of them that wait at the gate.",
            "short",
            (
                ("sum(chunkserve:num_requests_live)", "live"),
                ("sum(chunkserve:num_requests_waiting)", "at the gate"),
            ),
        ),
        Panel(
            "First token",
            "Time from the arrival at the ingress, of those that came.",
            "s",
            _quantiles("chunkserve:time_to_first_token_seconds", 0.5, 0.95, 0.99),
        ),
        Panel(
            "Where the time goes",
            "Medians: at the gate, with the engines, and the server's own overhead.",
            "s",
            (
                *((q, "gate") for q, _ in _quantiles("chunkserve:request_gate_time_seconds", 0.5)),
                *((q, "engines") for q, _ in _quantiles("chunkserve:request_engine_time_seconds", 0.5)),
                *((q, "overhead") for q, _ in _quantiles("chunkserve:request_overhead_seconds", 0.5)),
            ),
        ),
        Panel(
            "Whole requests",
            "From arrival to the last byte.",
            "s",
            _quantiles("chunkserve:e2e_request_latency_seconds", 0.5, 0.95),
        ),
        Panel(
            "Moves",
            "Answers that continued at another engine, and those that found none.",
            "ops",
            (
                (_rate("chunkserve:migrations_total"), "moved"),
                (_rate("chunkserve:migrations_failed_total"), "lost"),
            ),
        ),
        Panel(
            "Token channel",
            "Answers with a lost frame, and those completed from the Serve call instead.",
            "ops",
            (
                (_rate("chunkserve:channel_gaps_total"), "gaps"),
                (_rate("chunkserve:channel_completions_total"), "completed by the call"),
            ),
        ),
        Panel(
            "Prefix affinity",
            "Share of the prompt tokens that the router expected in the chosen engine's cache.",
            "percentunit",
            ((_share("chunkserve:router_overlap_tokens_total", "chunkserve:router_prompt_tokens_total"), "expected"),),
        ),
        Panel(
            "Deadlines missed",
            "Requests without a complete answer at their deadline, and requests that ended without a first token after "
            "more than 2.5 s.",
            "ops",
            (
                (_rate("chunkserve:deadline_misses_total"), "missed"),
                (_rate("chunkserve:first_tokens_missed_total"), "no first token"),
            ),
        ),
        Panel(
            "Replicas that do not answer",
            "A scrape asks every replica; these did not answer within 3 s.",
            "short",
            (("chunkserve:replicas_missing", "{{deployment}}"),),
        ),
        Panel(
            "Scrape",
            "Duration of a scrape. Above 10 s, Prometheus gives up.",
            "s",
            (('scrape_duration_seconds{job="chunkserve"}', "duration"),),
        ),
    ),
)


def _of_all_models(metric: str) -> str:
    """Return the sum over the engine deployments, of which each model has one, of a gauge that replicas repeat."""
    return f'sum(max by (deployment) ({metric}{{deployment=~"Engine(-.+)?"}}))'


AUTOSCALING = Dashboard(
    "autoscaling",
    "chunkserve / autoscaling",
    (
        Panel(
            "Engines",
            "Desired by the policy, set as target, and answering.",
            "short",
            (
                (_of_all_models("ray_serve_autoscaling_desired_replicas"), "wanted"),
                (_of_all_models("ray_serve_autoscaling_target_replicas"), "target"),
                ("count(vllm:kv_cache_usage_perc)", "answering"),
            ),
        ),
        Panel(
            "Ray nodes",
            "Active, and requested from Kubernetes.",
            "short",
            (
                ("sum by (NodeType) (autoscaler_active_nodes)", "active {{NodeType}}"),
                ("sum by (NodeType) (autoscaler_pending_nodes)", "pending {{NodeType}}"),
            ),
        ),
        Panel(
            "Failed nodes",
            "Nodes that ended before they were removed.",
            "short",
            (("sum by (NodeType) (autoscaler_recently_failed_nodes)", "{{NodeType}}"),),
        ),
        Panel(
            "What asks for more: seats",
            "Running requests, and all waiting ones.",
            "short",
            (
                ("sum(vllm:num_requests_running)", "running"),
                ("sum(vllm:num_requests_waiting) + sum(chunkserve:num_requests_waiting)", "waiting"),
            ),
        ),
        Panel(
            "What asks for more: KV",
            "Share of KV blocks in use, in the fullest engine and on average.",
            "percentunit",
            (
                ("max(vllm:kv_cache_usage_perc)", "fullest"),
                ("avg(vllm:kv_cache_usage_perc)", "mean"),
            ),
        ),
        Panel(
            "What asks for more: prompts",
            "Prompt tokens a second that were not in the cache.",
            "short",
            ((f"{_rate('vllm:prompt_tokens_total')} - {_rate('vllm:prompt_tokens_cached_total')}", "to compute"),),
        ),
        Panel(
            "Balance",
            "Running requests of the fullest engine over the mean: 1 is even.",
            "short",
            (("max(vllm:num_requests_running) / avg(vllm:num_requests_running)", "fullest / mean"),),
        ),
        Panel(
            "GPU",
            "Utilization and memory of Ray's nodes.",
            "percent",
            (
                ("avg(ray_node_gpus_utilization)", "utilization"),
                ("100 * sum(ray_node_gram_used) / (sum(ray_node_gram_used) + sum(ray_node_gram_available))", "memory"),
            ),
        ),
        Panel(
            "Age of what the policy sees",
            "Delay of the replicas' reports; above stale_after_s nothing is removed.",
            "ms",
            (
                ("max(ray_serve_autoscaling_replica_metrics_delay_ms)", "replicas"),
                ("max(ray_serve_autoscaling_handle_metrics_delay_ms)", "handles"),
            ),
        ),
    ),
)

SLO = Dashboard(
    "slo",
    "chunkserve / SLO",
    (
        Panel(
            "Good requests",
            "Neither failed, interrupted nor refused for lack of room; the objective is 99.5 %.",
            "percentunit",
            (
                ("1 - chunkserve:bad_requests:ratio_rate5m", "5 minutes"),
                ("1 - chunkserve:bad_requests:ratio_rate1h", "hour"),
                ("1 - chunkserve:bad_requests:ratio_rate6h", "6 hours"),
            ),
        ),
        Panel(
            "Budget burn",
            "Multiples of the rate that uses up the budget in 30 days: 14.4 pages, 3 is a ticket.",
            "short",
            (
                ("chunkserve:bad_requests:ratio_rate5m / 0.005", "5 minutes"),
                ("chunkserve:bad_requests:ratio_rate1h / 0.005", "hour"),
                ("chunkserve:bad_requests:ratio_rate6h / 0.005", "6 hours"),
            ),
        ),
        Panel(
            "First tokens in time",
            "Within 2.5 s, of those that came and those that had not come by then; the objective is 95 %.",
            "percentunit",
            (
                ("1 - chunkserve:late_first_tokens:ratio_rate5m", "5 minutes"),
                ("1 - chunkserve:late_first_tokens:ratio_rate1h", "hour"),
            ),
        ),
        Panel(
            "Gaps in time",
            "Tokens within 200 ms of the previous one; the objective is 99 %.",
            "percentunit",
            (("1 - chunkserve:slow_gaps:ratio_rate30m", "30 minutes"),),
        ),
        Panel(
            "Streams lost",
            "Streams in 10 minutes that found no other engine; more than 3 page.",
            "short",
            (("sum(increase(chunkserve:migrations_failed_total[10m]))", "lost"),),
        ),
        Panel(
            "Alerts",
            "Alerts that fire now.",
            "short",
            (('ALERTS{alertname=~"Chunkserve.*", alertstate="firing"}', "{{alertname}}"),),
        ),
    ),
)

DASHBOARDS = (ENGINE, SERVING, AUTOSCALING, SLO)


def document(dashboard: Dashboard) -> dict[str, Any]:
    """Build the document that Grafana imports."""
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0}
    return {
        "uid": f"chunkserve-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["chunkserve"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": [_panel(i, panel) for i, panel in enumerate(dashboard.panels)],
    }


def _panel(i: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": i + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": i * _WIDTH % _COLUMNS, "y": i * _WIDTH // _COLUMNS * _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": {"spanNulls": False}}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + j), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for j, (query, legend) in enumerate(panel.queries)
        ],
    }


def text(dashboard: Dashboard) -> str:
    return json.dumps(document(dashboard), indent=1) + "\n"


def main() -> None:
    """Write every dashboard to the file that the manifests use."""
    for dashboard in DASHBOARDS:
        (DIRECTORY / f"{dashboard.name}.json").write_text(text(dashboard))


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m k8s.dashboards", description="Write the Grafana dashboards' JSON files."
    ).parse_args()
    main()
