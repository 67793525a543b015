"""Which engine replica a call goes to: by cached prefix, session and load.

`router` is what Ray Serve loads, `chooser` ranks replicas, and `placement` has the rule. `fleet` and `prefix_index` are
what is known of the engines, from the reports in `stats`.

Never waits for another process while it decides.
"""
