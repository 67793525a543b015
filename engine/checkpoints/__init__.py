"""A model's files, from a name to a directory that the engine can read. `prepare` is the command and the entry.

`model_source` finds files, `model_cache` keeps what was made of them, and `gguf_*` convert.
"""
