"""Measures what lower tiers of KV bring and cost: the phases of benchmarks.engine.kv_tiers."""
