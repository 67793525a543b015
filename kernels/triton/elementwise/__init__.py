"""Holds the operations on single tokens, each one pass over memory.

`norm`, `activation` and `gates` stand between matrix products. `rotate` does per-head norms, rotation and the KV cache
write in one launch; `cache` is that write alone, and `narrow` rounds what either writes to 8 bits.
"""
