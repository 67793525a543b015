"""Writes the text for Prometheus: every replica's samples under the catalogue's names, as one series per replica.
Never adds the counters of two replicas: when one ends, the sum falls, which Prometheus takes for a restart of all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from serve_app.metrics.catalogue import CLUSTER, ENGINE, INGRESS, MISSING, MISSING_HELP, Metric
from serve_app.metrics.cluster_load import cluster_load
from serve_app.metrics.values import Distribution, ReplicaSamples, Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """The answers of both deployments' replicas."""

    engines: Sequence[ReplicaSamples] = ()
    ingresses: Sequence[ReplicaSamples] = ()
    missing: Mapping[str, int] = field(default_factory=dict)
    """Deployment -> how many of its replicas did not answer."""

    @property
    def num_chars(self) -> int:
        """An estimate of the text's length, two thirds of which are buckets."""
        return sum(1000 * len(replica.samples) for replica in (*self.engines, *self.ingresses))


def expose(scrapes: Mapping[str, Scrape]) -> str:
    """Write the text. `scrapes`: by the model's name. Samples that are not in the catalogue, from replicas of another
    version, are left out."""
    engines = [(model, replica) for model, scrape in scrapes.items() for replica in scrape.engines]
    ingresses = [(model, replica) for model, scrape in scrapes.items() for replica in scrape.ingresses]
    lines = [*_families(ENGINE, engines), *_families(INGRESS, ingresses)]
    loads = {model: cluster_load(scrape.engines, scrape.ingresses) for model, scrape in scrapes.items()}
    for metric in CLUSTER:
        lines += _head(metric.name, metric.help, metric.kind)
        for model, load in loads.items():
            if metric.name in load:
                lines.append(_line(metric.name, [("model_name", model)], load[metric.name]))
    lines += _head(MISSING, MISSING_HELP, "gauge")
    for model, scrape in scrapes.items():
        for deployment in ("engine", "ingress"):
            labels = [("model_name", model), ("deployment", deployment)]
            lines.append(_line(MISSING, labels, scrape.missing.get(deployment, 0)))
    return "\n".join([*lines, ""])


def _families(metrics: Iterable[Metric], replicas: Sequence[tuple[str, ReplicaSamples]]) -> Iterator[str]:
    """Write each metric once, with the series of all replicas. `replicas`: with the model's name."""
    for metric in metrics:
        name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
        yield from _head(name, metric.help, metric.kind)
        for model_name, replica in replicas:
            for sample in replica.samples:
                if sample.name == metric.name and _fits(sample, metric):
                    own = zip(metric.labels, sample.labels, strict=True)
                    yield from _series(
                        name, [("model_name", model_name), (metric.owner, replica.replica_id), *own], sample.value
                    )


def _fits(sample: Sample, metric: Metric) -> bool:
    if isinstance(sample.value, Distribution):
        is_right = metric.kind == "histogram" and len(sample.value.counts) == len(sample.value.bounds) + 1
    else:
        is_right = metric.kind != "histogram"
    return is_right and len(sample.labels) == len(metric.labels)


def _head(name: str, text: str, kind: str) -> list[str]:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return [f"# HELP {name} {escaped}", f"# TYPE {name} {kind}"]


def _series(name: str, labels: Labels, value: float | Distribution) -> Iterator[str]:
    if not isinstance(value, Distribution):
        yield _line(name, labels, value)
        return
    totals = list(accumulate(value.counts))
    for bound, total in zip((*value.bounds, math.inf), totals, strict=True):
        yield _line(f"{name}_bucket", [*labels, ("le", _number(bound))], total)
    yield _line(f"{name}_sum", labels, value.sum)
    yield _line(f"{name}_count", labels, totals[-1])


def _line(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    return f"{name}{{{inside}}} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    """Write a number as a float, like Prometheus's own client. Buckets are identified by this text, so that 1 and 1.0
    would be two."""
    return "+Inf" if value == math.inf else repr(float(value))
