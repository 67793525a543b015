"""Measurement of an ingress alone: what other requests wait beside large ones."""
