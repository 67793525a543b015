"""Decides at a gate before the engines which requests are let in, and which wait for how long.

`gate` decides, and `backlog` measures how fast waiting work is done. The limits are in `settings.limits`.
Never knows HTTP or Ray.
"""
