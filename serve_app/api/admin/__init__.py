"""Serves the routes for operators: the current activity, ending requests, draining, and LoRA adapters.
`activity` shows what replicas do, `control` ends requests and empties caches, and `adapters` loads and unloads them.
"""
