"""Dashboards and alerts ask for metrics that are exported, and are what their sources say."""

from __future__ import annotations

import copy
import json

import pytest
import yaml

from k8s import dashboards
from k8s.validate import alerts, metric_names
from k8s.validate.manifests import K8S
from serve_app.metrics.catalogue import BY_NAME
from serve_app.metrics.ingress_recorder import LATE_FIRST_TOKEN_S


@pytest.mark.parametrize("dashboard", dashboards.DASHBOARDS, ids=lambda one: one.name)
def test_a_dashboards_json_is_what_its_panels_say(dashboard: dashboards.Dashboard) -> None:
    written = (dashboards.DIRECTORY / f"{dashboard.name}.json").read_text()
    assert written == dashboards.text(dashboard), "run `make render-k8s`"


def test_every_dashboard_is_shipped() -> None:
    shipped = yaml.safe_load((K8S / "monitoring" / "kustomization.yaml").read_text())["configMapGenerator"]
    files = [file for config_map in shipped for file in config_map["files"]]
    assert sorted(files) == sorted(f"dashboards/{path.name}" for path in dashboards.DIRECTORY.iterdir())
    assert sorted(files) == sorted(f"dashboards/{one.name}.json" for one in dashboards.DASHBOARDS)


@pytest.mark.parametrize("dashboard", dashboards.DASHBOARDS, ids=lambda one: one.name)
def test_panels_do_not_overlap_and_stay_in_the_grid(dashboard: dashboards.Dashboard) -> None:
    cells = []
    for panel in json.loads(dashboards.text(dashboard))["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells += [
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        ]
    assert len(cells) == len(set(cells))


def test_every_query_asks_for_names_that_are_exported() -> None:
    assert metric_names.check() == []


def test_a_name_that_nothing_exports_is_found_where_it_stands() -> None:
    rules = copy.deepcopy(alerts.rules())
    rule = rules["spec"]["groups"][1]["rules"][0]
    rule["expr"] = 'sum by (engine) (rate(vllm:gpu_cache_usage_perc{job="up"}[5m])) > bool 3 or up == 0'
    (found,) = metric_names.check(rules)
    assert found.where == "PrometheusRule spec.groups[1].rules[0].expr"
    assert found.problem == "nothing exports vllm:gpu_cache_usage_perc"


@pytest.mark.parametrize(
    ("query", "legend", "problem"),
    [
        ('vllm:num_requests_running{reason="capacity"}', "", "vllm:num_requests_running has no label reason"),
        ("sum by (reason) (vllm:num_requests_running)", "", "nothing in it has a label reason"),
        ("vllm:num_requests_running", "{{ingress}}", "its answer has no label ingress"),
        ("sum by (engine) (vllm:request_success_total)", "{{x}}", "its answer has no label x"),
        ('sum by (le) (vllm:iteration_tokens_total_count{engine=~"a"})', "", "nothing in it has a label le"),
    ],
)  # fmt: skip
def test_a_label_that_no_series_has_is_found(query: str, legend: str, problem: str) -> None:
    """Such a query has no answer, or one line of all series together, and no error."""
    assert metric_names.unknown_labels(query, legend) == [problem]


def test_labels_of_metrics_that_are_not_ours_are_not_judged() -> None:
    assert metric_names.unknown_labels('sum by (NodeType) (autoscaler_active_nodes{x="y"})', "{{NodeType}}") == []


def test_a_counter_without_its_suffix_and_a_bare_histogram_are_not_exported() -> None:
    assert "vllm:num_preemptions_total" in metric_names.exported()
    assert "vllm:num_preemptions" not in metric_names.exported()
    assert "vllm:time_to_first_token_seconds" not in metric_names.exported()
    assert "ray_serve_autoscaling_target_replicas" in metric_names.exported()
    assert "ray_serve_autoscaling_wishes" not in metric_names.exported()


def test_names_are_told_from_functions_labels_and_keywords() -> None:
    query = (
        'histogram_quantile(0.9, sum by (le, engine) (rate(a:b_bucket{x="c_d", le="1"}[$__rate_interval])))'
        " / on (engine) group_left (job) (e_f offset 5m unless absent(g)) > 14.4 * 0.005"
    )
    assert metric_names.names_in(query) == {"a:b_bucket", "e_f", "g"}


def test_the_bucket_that_an_alert_counts_up_to_is_one_that_is_exported() -> None:
    """A query for a bucket that does not exist has no answer, and its alert never fires."""
    wanted = {"chunkserve:time_to_first_token_seconds": LATE_FIRST_TOKEN_S, "vllm:inter_token_latency_seconds": 0.2}
    text = metric_names.ALERTS.read_text()
    for name, bound in wanted.items():
        assert f'{name}_bucket{{le="{bound:g}"}}' in text
        assert bound in BY_NAME[name].bounds(4096)
    assert text.count("le=") == 3


def test_every_alert_has_its_tests_a_summary_and_a_severity_and_every_page_its_runbook() -> None:
    assert alerts.check() == []


def test_six_alerts_wake_people() -> None:
    pages = [alert["alert"] for alert in alerts.alerts_of(alerts.rules()) if alert["labels"]["severity"] == "page"]
    assert len(pages) == 6
    runbook = (K8S / "README.md").read_text().partition("## Runbook")[2]
    assert [line[4:] for line in runbook.splitlines() if line.startswith("### ")] == pages


ALERT = {
    "alert": "New",
    "expr": "up == 0",
    "labels": {"severity": "page"},
    "annotations": {"summary": "x", "runbook_url": "#new"},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": {"severity": "critical"}}, "labels.severity: must be page or ticket"),
        ({"annotations": {"runbook_url": "#start"}}, "annotations.summary: is missing"),
        ({}, "annotations.runbook_url: leads to no section"),
        ({"annotations": {"summary": "x", "runbook_url": "#start"}}, "no test in alerts.test.yaml in which it fires"),
    ],
)
def test_an_alert_that_lacks_something_is_reported(change: dict[str, object], message: str) -> None:
    found = alerts.check({"spec": {"groups": [{"name": "g", "rules": [{**ALERT, **change}]}]}})
    assert any(message in str(one) for one in found), found


def test_an_alert_is_not_tested_until_a_case_has_it_quiet() -> None:
    tests = {"tests": [{"alert_rule_test": [{"alertname": "New", "exp_alerts": [{"exp_labels": {}}]}]}]}
    found = alerts.check({"spec": {"groups": [{"name": "g", "rules": [ALERT]}]}}, tests)
    assert [one.problem for one in found if "test" in one.problem] == [
        "no test in alerts.test.yaml in which it does not fire"
    ]
