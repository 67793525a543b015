"""Measures what a streamed token costs between client and engine, for several ways to send it.

`run` measures, `apps` has the ways that are not ours, and `figures` evaluates the measurements.

Never imports a server that it measures.
"""
