"""Chooses the engine replica for a call by cached prefix, session and load.

`router` is what Ray Serve loads, `chooser` ranks replicas, and `placement` has the rule. `fleet` and `tiered_index`,
on `engine.prefix_index`, hold what is known about the engines, from the reports in `stats`.

Never waits for another process while it decides.
"""
