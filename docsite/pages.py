"""Owns the list of generated files of docs/, and their generators.
Never has a text of its own except the introductions of generated pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from docsite import (
    commands,
    diagram,
    error_reference,
    features,
    field_reference,
    highlights,
    notebook,
    packages,
    plans,
    reference,
    refusals,
    routes,
    rules,
    stalls,
)
from loadtest.marks import with_text

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

SETTINGS = """\
# Settings

Written by `make docs`. `config.yaml` is a Ray Serve config. This page has every setting under `args:` of the
application; all other keys are Ray Serve's. Unknown keys are refused. At its start, an engine logs the values that it
derived from the settings on this machine (dtype, KV blocks, threads, kernels), and why.

Settings that exclude each other are refused: [Features](features.md) says which do, and why.

Most settings can be left alone. This page begins with the few that matter, and [The settings that
matter](../how-to/tuning.md) says how to choose them.
"""

METRICS = """\
# Metrics

Written by `make docs` from `serve_app/metrics/catalogue.py`. `curl http://<host>:<port>/metrics`, or a Prometheus job
with that target and its default path, reads all replicas at once: the ingress replica that answers asks the others and
the engines. Like `/health`, it needs no API key. It shows no text, tenant or key, and it does not wake engines that are
scaled to zero.

The engines' metrics have vLLM's names, so that dashboards made for vLLM work. Metrics that vLLM does not have begin
with `chunkserve:`.

**Series.** Every replica has its own series, distinguished by the label `engine` or `ingress`. Sum them in the query:
`sum(rate(...))`. A series begins at zero when its replica starts, and ends with the replica; a replacement has another
id. A replica that does not answer within 3 s is missing from the scrape, and `chunkserve:replicas_missing` counts it.

**Gateways.** The endpoint pickers of gateways read one series of a name, and would take the first engine's for all. For
them there are three metrics without a replica's label: `chunkserve:requests_running_per_engine`,
`chunkserve:requests_waiting_per_engine` and `chunkserve:kv_cache_usage_mean`. They are absent while no engine answers.
[Behind a gateway](../how-to/gateway.md) has more.

**Tiers.** Metrics of [tiers](../how-to/keep-prefixes.md) are there only if `engine.kv_tiers` sets one. The label `tier`
is `host` or `disk`. Prompt tokens that were loaded are also in `vllm:prefix_cache_hits_total`, which in vLLM counts
only those that were in the KV cache. Names with `external_prefix_cache` and `kv_offload` are vLLM's, for all tiers
together.

**What counts as a request.** An answer that moves to another engine is one request to each of them. Histograms of
whole requests contain those that ended by `stop` or `length` (engines), or with a complete answer (ingress).

**Queues.** Requests wait at the ingress first. The whole queue is `chunkserve:num_requests_waiting` plus
`vllm:num_requests_waiting`.

**Time.** A request's time at the ingress is `chunkserve:e2e_request_latency_seconds`. It is the sum of the gate time,
the engine time and the overhead, which is the server's own. The difference between the engine time and
`vllm:e2e_request_latency_seconds` is the time of the way there and back.
"""

REFUSALS = """\
# Refusals at start

Written by `make docs`, from the code. A server that cannot start ends with one of these lines, where … stands for names
and numbers. The remedy is above each list, and in most cases in the line itself.
[Troubleshooting](../how-to/troubleshooting.md#the-server-does-not-start) has the most common ones.
"""


def settings_page() -> str:
    return f"{SETTINGS}\n{reference.render()}"


def metrics_page() -> str:
    return f"{METRICS}\n{reference.render_metrics()}"


def refusals_page() -> str:
    return f"{REFUSALS}\n{refusals.render()}"


def highlights_table() -> str:
    return highlights.table(json.loads((ROOT / "loadtest" / "results" / "peers.json").read_text(encoding="utf-8")))


WHOLE: dict[str, Callable[[], str]] = {
    "reference/settings.md": settings_page,
    "reference/metrics.md": metrics_page,
    "reference/api-fields.md": field_reference.render,
    "reference/routes.md": routes.render,
    "reference/command-line.md": commands.render,
    "reference/refusals.md": refusals_page,
    "reference/features.md": features.render,
    "tutorials/library.md": notebook.render,
    "explanation/rules.md": rules.render,
    "explanation/packages.md": packages.page,
    **{tree.picture: partial(packages.picture, tree) for tree in packages.TREES},
    "request-path.svg": diagram.render,
}
"""Files of docs/ that are generated completely."""

PARTS: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "highlights"): highlights_table,
    ("docs/comparison.md", "highlights"): highlights_table,
    ("engine/DESIGNS.md", "presets"): reference.render_presets,
    ("docs/how-to/troubleshooting.md", "errors"): error_reference.render,
    ("docs/benchmarks/ingress-stalls.md", "ingress stalls"): lambda: stalls.table(stalls.kept()),
    ("docs/how-to/plan.md", "plan"): lambda: plans.table(plans.kept()),
}
"""(File, name of the marks) -> the generator of the text between the marks."""


def rendered() -> dict[Path, str]:
    """Return every generated file with the text that it should have."""
    pages = {DOCS / name: render().rstrip("\n") + "\n" for name, render in WHOLE.items()}
    for (name, mark), render in PARTS.items():
        pages[ROOT / name] = with_text((ROOT / name).read_text(encoding="utf-8"), mark, render())
    return pages
