"""Measurements of the project, each a command (`python -m benchmarks.engine.step --help`). Nothing imports them."""
