"""Chooses the engine replica for a call by cached prefix, session and load.

`router` is what Ray Serve loads, `chooser` ranks replicas, and `placement` has the rule. `fleet`, `prefix_index` and
`tiered_index` hold what is known about the engines, from the reports in `stats`.

Never waits for another process while it decides.
"""
