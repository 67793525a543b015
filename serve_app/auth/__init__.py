"""Identifies the sender of a request by its API key, and decides who may use the admin routes.

`keys` checks them. `python -m serve_app.auth` makes one.
"""
