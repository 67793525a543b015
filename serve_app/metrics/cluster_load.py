"""Owns the load of all engines together as a gateway's endpoint picker reads it: one number for each of its questions.
Never adds up a counter: only what is true at this moment has a mean."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.metrics.catalogue import CLUSTER, KV_CACHE_USAGE, NUM_RUNNING, NUM_WAITING, NUM_WAITING_AT_GATE
from serve_app.metrics.values import Distribution, ReplicaSamples


def cluster_load(engines: Sequence[ReplicaSamples], ingresses: Sequence[ReplicaSamples]) -> dict[str, float]:
    """Return the value of each metric of CLUSTER by its name, as a mean of the engines that answered; nothing if none
    did, since a cluster that cannot serve would look idle and attract all requests."""
    at_gates = sum(_values(NUM_WAITING_AT_GATE, ingresses))
    load = {}
    for metric, name, more in zip(CLUSTER, (NUM_RUNNING, NUM_WAITING, KV_CACHE_USAGE), (0, at_gates, 0), strict=True):
        if values := _values(name, engines):
            load[metric.name] = (sum(values) + more) / len(values)
    return load


def _values(name: str, replicas: Sequence[ReplicaSamples]) -> list[float]:
    """Return the numbers of a gauge without labels. What a replica of another version says otherwise is left out."""
    found = [sample for replica in replicas for sample in replica.samples if sample.name == name and not sample.labels]
    return [sample.value for sample in found if not isinstance(sample.value, Distribution)]
