"""What the replicas measure, and how one of them answers a scrape for all.

`catalogue` lists every metric. `engine_recorder` and `ingress_recorder` count, `gather` asks all replicas, and
`exposition` writes what Prometheus reads. `activity` is what replicas do just now.
"""
