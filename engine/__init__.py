"""The engine: token ids in, token ids out. A pure-Python scheduler on one side, an executor on the other.
Importing this package imports nothing else, so that the pure modules stay free of torch."""
