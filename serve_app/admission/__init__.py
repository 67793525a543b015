"""The gate before the engines: who is let in, who waits and for how long.

`gate` decides, and `backlog` measures how fast waiting work is done. Their limits are in `settings.limits`.
Never knows HTTP or Ray.
"""
