"""The assembly of an engine: `build_engine` for callers, the rest by device.

`resolve` turns what was asked into what is served, `executor` chooses `cpu` or `gpu`, `encoder` and `draft` add parts,
and `host_fit` holds all of it against the machine's memory. Only here does the core meet torch.
"""
