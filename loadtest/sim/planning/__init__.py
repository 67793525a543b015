"""Finds the replicas and settings that hold a load, by simulation: what `chunkserve plan` does.

`demand` is the load, `machine` the engine that serves it, `search` the search, which knows neither, `evaluate` the
simulations behind it, and `answer` what is told.
"""
