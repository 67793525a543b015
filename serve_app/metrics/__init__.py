"""Measures what the replicas do, and lets any one of them answer a scrape for all.

`catalogue` lists every metric. `engine_recorder` and `ingress_recorder` count, `gather` asks all replicas, and
`exposition` writes Prometheus's format. `cluster_load` is what gateways read. `activity` describes what replicas are
doing now.
"""
