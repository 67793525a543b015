"""Assembles an engine: callers use `build_engine`; the other modules work by device.

`resolve` turns the config into what is served, `executor` chooses the start on `cpu` or `gpu`, and `model` puts
weights, decoder, KV cache and runner together for either. `encoder` and `draft` handle models with an encoder and draft
models, and `host_fit` checks that all of it fits into the machine's memory. Only here does the core meet torch.
"""
