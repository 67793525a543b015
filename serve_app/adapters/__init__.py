"""Maps the names that clients ask for to what one server serves: the model, its LoRA adapters, and aliases.

`names` is an ingress replica's list, `aliases` matches patterns, and `named_adapters` is an engine replica's list.
The routes that change them are in `api.admin`.
"""
