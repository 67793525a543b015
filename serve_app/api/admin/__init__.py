"""Routes for whoever runs the server: what goes on, ending requests, draining, and LoRA adapters.

`activity` shows what replicas do, `control` ends requests and empties caches, and `adapters` loads and unloads.
"""
