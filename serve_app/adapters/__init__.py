"""What one server serves, by the names that clients ask for: the model, its LoRA adapters, and aliases.

`names` is an ingress replica's list, `aliases` matches patterns, and `shelf` is an engine replica's list of adapters.
The routes that change them are in `api.admin`.
"""
