"""An InferencePool, its route and its endpoint picker find each other and the metrics, as the how-to says."""

from __future__ import annotations

import re

import yaml

from k8s.validate import custom_resources, gateway, metric_names
from k8s.validate.builds import rendered
from k8s.validate.manifests import K8S, ROOT, Doc, at, groups, of_kind
from serve_app.api.http.load_report import ASKED, TOLD
from serve_app.api.requests.session import HEADER
from serve_app.metrics.catalogue import BY_NAME

PAGE = (ROOT / "docs" / "how-to" / "gateway.md").read_text()
COMPONENT = K8S / "components" / "inference-gateway"
CONFIG: Doc = yaml.safe_load((COMPONENT / "config.yaml").read_text())
DOCS = rendered("inference-gateway")


def specs() -> dict[str, str]:
    """Return the metrics that the picker is told of, by its names for them."""
    (extractor,) = [plugin for plugin in CONFIG["plugins"] if plugin["type"] == "core-metrics-extractor"]
    (engine,) = extractor["parameters"]["engineConfigs"]
    assert extractor["parameters"]["defaultEngine"] == engine["name"]
    return {field: metric for field, metric in engine.items() if field.endswith("Spec")}


def test_what_the_picker_reads_is_exported_as_a_gauge_and_in_the_pages_table() -> None:
    rows = dict(re.findall(r"^\| .* \| `([\w:]+)` \| (\w+) \| .* \|$", PAGE, re.MULTILINE))
    assert set(specs().values()) == set(rows)
    assert {BY_NAME[name].kind for name in rows} == set(rows.values()) == {"gauge"}
    for name in ("vllm:cache_config_info", "vllm:lora_requests_info"):
        row = next(line for line in PAGE.splitlines() if f"`{name}` | gauge" in line)
        assert set(re.findall(r"`(\w+)`", row.partition("| `vllm")[0])) <= set(BY_NAME[name].labels)


def test_the_numbers_that_workers_are_scored_by_have_one_series_each() -> None:
    """With a series for each engine, the picker would judge every worker by the first."""
    scored = {field: metric for field, metric in specs().items() if field[:2] in ("qu", "ru", "kv")}
    assert len(scored) == 3
    assert {BY_NAME[metric].owner for metric in scored.values()} == {"cluster"}


def test_the_pool_has_the_workers_that_take_clients_and_no_others() -> None:
    (pool,) = of_kind(DOCS, "InferencePool")
    wanted = pool["spec"]["selector"]["matchLabels"].items()
    (spot,) = of_kind(rendered("spot"), "RayService")
    assert [group.name for group in groups(spot) if wanted <= group.labels.items()] == ["engine"]


def test_nobody_limits_the_gateways_own_address() -> None:
    (service,) = of_kind(DOCS, "RayService")
    for group in groups(service):
        assert group.env()["CHUNKSERVE_MAX_CONNECTIONS_PER_SOURCE"] == "0"


def test_the_session_that_the_picker_keeps_is_the_servers() -> None:
    (scorer,) = [plugin for plugin in CONFIG["plugins"] if plugin["type"] == "session-affinity-scorer"]
    assert scorer["parameters"]["sessionIdConfig"]["sources"] == [{"header": HEADER.lower()}]


def test_a_cluster_without_an_engine_is_left_out_and_one_between_two_scrapes_is_not() -> None:
    (detector,) = [plugin for plugin in CONFIG["plugins"] if plugin["type"] == "utilization-detector"]
    (profile,) = CONFIG["schedulingProfiles"]
    assert profile["plugins"][0] == {"pluginRef": "utilization-detector"}
    (picker,) = of_kind(DOCS, "Deployment")
    args = dict(arg.split("=") for arg in at(picker, "spec.template.spec.containers[0].args"))
    refresh, stale = args["--refresh-metrics-interval"], args["--metrics-staleness-threshold"]
    assert detector["parameters"]["metricsStalenessThreshold"] == stale
    assert gateway.seconds(stale) >= 3 * gateway.seconds(refresh)


def test_the_picker_lets_every_route_of_the_server_through() -> None:
    """Its default parsers know OpenAI's and Anthropic's, and refuse the rest."""
    assert CONFIG["requestHandler"]["parsers"][-1] == {"pluginRef": "passthrough-parser"}
    assert not [plugin for plugin in CONFIG["plugins"] if plugin["type"].startswith("prefix-")]  # these need a prompt


def test_the_headers_of_the_page_are_the_servers() -> None:
    table = PAGE.partition("## Headers")[2]
    assert {HEADER, f"{ASKED}: JSON"} <= set(re.findall(r"^\| `([^`]+)`", table, re.MULTILINE))
    assert f"`{TOLD}`" in table


def test_the_versions_of_the_page_are_those_that_are_checked_and_started() -> None:
    sources = yaml.safe_load((custom_resources.CRDS / "sources.yaml").read_text())
    versions = {source["project"].rpartition("/")[2]: source["version"] for source in sources}
    assert f"inference extension {versions['gateway-api-inference-extension']}" in PAGE.replace("\n", " ")
    assert f"Gateway API {versions['gateway-api']}" in PAGE.replace("\n", " ")
    (picker,) = of_kind(DOCS, "Deployment")
    image = at(picker, "spec.template.spec.containers[0].image")
    assert f"`llm-d-router` {image.rpartition(':')[2]}" in PAGE
    for option in re.findall(r"`(--refresh[^`]+|--metrics-stale[^`]+)`", PAGE):
        assert option in at(picker, "spec.template.spec.containers[0].args")


def test_the_files_and_objects_that_the_page_names_are_there() -> None:
    assert all((ROOT / path).exists() for path in re.findall(r"\bk8s/[\w./-]+\w", PAGE))
    names = {at(doc, "metadata.name") for doc in DOCS}
    assert "chunkserve-endpoint-picker" in names
    (route,) = of_kind(DOCS, "HTTPRoute")
    assert f"a Gateway named `{route['spec']['parentRefs'][0]['name']}`" in PAGE
    assert at(route, "spec.rules[0].timeouts.request") == "0s"


def test_durations_of_the_gateway_api_are_read() -> None:
    assert [gateway.seconds(text) for text in ("0s", "15m", "1m30s", "500ms", "1h")] == [0, 900, 90, 0.5, 3600]


def test_a_metric_with_labels_is_known_by_its_name() -> None:
    assert metric_names.names_in("vllm:num_requests_waiting_by_reason{reason=capacity}") <= metric_names.exported()
