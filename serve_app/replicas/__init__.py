"""Runs in a replica's process: the two deployments, their interpreter's settings, and their watchdog.

`deployment` puts the server together: an engine behind a channel, and an API in front of them.
`model` opens one model in an ingress replica. `sleeper` wakes one that has no engine, `room_maker` puts another to
sleep for it, and `cluster` says when that is needed.
"""
