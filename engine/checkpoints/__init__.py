"""Turns a model's name into a directory that the engine can read. `prepare` is the entry point and the command.

`model_source` finds files, `model_cache` keeps converted models, and `gguf_*` convert.
"""
