"""What is done to each token by itself, in one pass over memory.

`norm`, `activation` and `gates` stand between matrix products. `rotate` is norms by head, rotation and the write to the
KV cache in one launch; `cache` is that write alone.
"""
