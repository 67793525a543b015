"""What a streamed token costs between client and engine, for several ways to send it.

`run` measures, `apps` are the ways that are not ours, and `figures` are what is made of the measurements.

Imports nothing of what it measures.
"""
