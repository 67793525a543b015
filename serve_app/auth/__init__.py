"""API keys: who sends a request, and who may use the admin routes.

`keys` checks them. `python -m serve_app.auth` makes one.
"""
