"""The assembly of an engine: `build_engine` for callers, the rest by device.

`resolve` turns what was asked into what is served, `executor` chooses the start on `cpu` or `gpu`, and `model` puts
weights, decoder, KV cache and runner together for either. `encoder` and `draft` say what is special about theirs, and
`host_fit` holds all of it against the machine's memory. Only here does the core meet torch.
"""
