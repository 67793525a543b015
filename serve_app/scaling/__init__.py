"""Owns how many engine replicas there are: what engines report, and what that calls for.
Never starts or ends a replica; Ray Serve does."""
