"""The engine: token ids in, token ids out. It consists of a scheduler in pure Python and an executor.
Importing this package imports nothing else, so that the pure modules stay free of torch."""
