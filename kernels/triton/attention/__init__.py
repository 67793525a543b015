"""Paged attention: decode rows with their keys split among programs, chunks with their context.

`plan` has a step's rows as the kernels read them, `attention` launches, `kernel` computes one tile of queries, and
`combine` adds up the splits of a row.
"""
