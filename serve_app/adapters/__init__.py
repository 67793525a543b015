"""Maps the names that clients ask for to what one server serves: the model, its LoRA adapters, and aliases.

`names` is an ingress replica's list, `aliases` matches patterns, and `shelf` is an engine replica's list of adapters.
The routes that change them are in `api.admin`.
"""
