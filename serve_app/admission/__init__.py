"""Decides at a gate before the engines which requests are let in, and which wait for how long.

`gate` decides for one model, and `room` holds what the gates of several share. `backlog` measures how fast waiting work
is done, and `fleet_forecast` has what engines predict. The limits are in `settings.limits`.
Never knows HTTP or Ray.
"""
