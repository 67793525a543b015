"""Decides how many engine replicas there should be, from what the engines report.

`signals` is an engine's report, `autoscaler` decides, and `memory` is what it remembers. `policy` joins all of it to
Ray Serve.

Never starts or ends a replica: Ray Serve does.
"""
