"""Computes paged attention: decode rows with their keys split among programs, chunks with their context.

`plan` holds a step's rows as the kernels read them, `attention` launches, `kernel` computes one tile of queries, and
`combine` merges the splits of a row.
"""
