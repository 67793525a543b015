"""Owns which files of docs/ are generated, and from what.
Never holds a text of its own but the introductions of generated pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from docsite import commands, diagram, features, highlights, packages, refusals, routes, rules, stalls
from loadtest.marks import with_text
from serve_app import error_reference, field_reference, reference

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

SETTINGS = """\
# Settings

Written by `make docs`. `config.yaml` is Ray Serve's; `args:` of the application is ours, and this page is all of it.
Unknown keys are refused. What the machine made of the settings (dtype, KV blocks, threads, kernels, and why) is
logged when an engine starts.

Settings that do not go together are refused: [Features](features.md) says what goes with what, and why.

Most settings need no thought. [The settings that matter](../how-to/tuning.md) has the handful that decides latency
and memory.
"""

METRICS = """\
# Metrics

Written by `make docs`. `curl http://<host>:<port>/metrics`, or a Prometheus job with that target and its default
path, reads all replicas at once: whichever ingress replica answers asks the others and the engines. It needs no API
key, like `/health`, shows no text, tenant or key, and wakes no engine that sleeps.

The engines' numbers have vLLM's names, so that dashboards and gateways made for it work. What is new begins with
`chunkserve:`.

**Series.** Every replica has series of its own, by the label `engine` or `ingress`: sum them in the query,
`sum(rate(...))`. They begin at zero with the replica and end with it; its replacement has another id. A replica that
does not answer within 3 s is not in the scrape, and `chunkserve:replicas_missing` counts it.

**What counts as a request.** An answer that moves is a request to each of its engines. Histograms of whole requests
are of those that ended by `stop` or `length` (engines), or with a whole answer (ingress).

**Queues.** Requests wait at the ingress first: what queues is `chunkserve:num_requests_waiting` and
`vllm:num_requests_waiting` together.

**Time.** A request's time at the ingress is `chunkserve:e2e_request_latency_seconds`: its gate time, its engine time,
and the overhead, which is the server's own. What `vllm:e2e_request_latency_seconds` lacks of the engine time went
into the way there and back.
"""

REFUSALS = """\
# Refusals at start

Written by `make docs`, from the code that refuses. A start that cannot serve ends with one of these lines; … stands
for names and numbers. What to do stands above each list, and mostly in the line itself.
[Troubleshooting](../how-to/troubleshooting.md#the-server-does-not-start) has those that are met most.
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
    "explanation/rules.md": rules.render,
    "explanation/packages.md": packages.page,
    "packages.svg": packages.picture,
    "request-path.svg": diagram.render,
}
"""Files of docs/ that are generated as a whole."""

PARTS: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "highlights"): highlights_table,
    ("docs/comparison.md", "highlights"): highlights_table,
    ("docs/how-to/troubleshooting.md", "errors"): error_reference.render,
    ("docs/benchmarks/ingress-stalls.md", "ingress stalls"): lambda: stalls.table(stalls.kept()),
}
"""(File, name of the marks) -> what stands between the marks."""


def rendered() -> dict[Path, str]:
    """Every generated file with the text that it should have."""
    pages = {DOCS / name: render().rstrip("\n") + "\n" for name, render in WHOLE.items()}
    for (name, mark), render in PARTS.items():
        pages[ROOT / name] = with_text((ROOT / name).read_text(encoding="utf-8"), mark, render())
    return pages
