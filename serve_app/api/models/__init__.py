"""Owns which of the served models answers a request, and what belongs to each of them in an ingress replica.

`lane` has what belongs to one, and `lanes` finds the one that a request asks for.
"""
