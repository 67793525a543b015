"""Answers why a request was slow: `split` divides its wall time by cause, `recent` keeps that for the latest requests,
and `routes` shows it to whoever has the request's key.

Never measures: the ingress notes times as a request goes on, and its engine says where its own time went.
"""
