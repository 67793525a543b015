"""Runs in a replica's process: the two deployments, their interpreter's settings, and their watchdog.

`deployment` puts the server together: an engine behind a channel, and an API in front of one.
"""
