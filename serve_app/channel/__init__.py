"""Connects ingress and engine replicas: one Serve call per request, one token channel per pair, and migration.

`handle_client` is the client that the API uses. `token_sender` and `token_receiver` are the ends of the channel,
`frames` its bytes, and `migration` moves a stream whose engine replica has died.

Never holds text: token ids in, events out.
"""
