"""Measurements of the project, each a command (`python -m benchmarks.engine.step --help`). The product imports none."""
