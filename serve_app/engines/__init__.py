"""Holds what the rest of the server knows of the engines, but no connection to them.

`engine_client` is the interface that the API needs, and `channel` implements it; `engine_call` has a call's contents.
`engine_count`, `engine_load` and `liveness` hold the state of one process, which the router and the channel write.
"""
