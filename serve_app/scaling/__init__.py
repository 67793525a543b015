"""How many engine replicas there are: what engines report, and what that calls for.

`signals` is an engine's report, `autoscaler` decides, and `memory` is what it remembers. `policy` joins all of it to
Ray Serve.

Never starts or ends a replica; Ray Serve does.
"""
