"""Computes paged attention: rows with their keys split among programs, by their own length and count of
tokens, and by how many rows a step decodes at most.

`plan` holds a step's rows as the kernels read them, `splits` says how a row's keys are split, and `work` sums up what
there is to do. `attention` launches, `kernel` computes an item after another, `keys` a tile of keys of one item, and
`combine` merges a row's splits.
"""
