"""What the rest of the server knows of the engines, without a way to them.

`engine_client` is what the API asks of an engine, and `channel` implements it; `engine_call` is what one call carries.
`engine_count`, `engine_load` and `liveness` are notes of one process, which the router and the channel write.
"""
