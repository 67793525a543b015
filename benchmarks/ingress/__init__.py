"""Measures an ingress alone: how long other requests wait beside large ones."""
