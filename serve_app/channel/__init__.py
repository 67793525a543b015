"""Owns the way between ingress and engine replicas: one Serve call a request, one token channel a pair, migration.
Never holds text; token ids in, events out."""
