"""What all Triton kernels share: how they are started, and the row that a program works on.

`launch` starts them, compiled or interpreted. `tiles` finds a program's row where rows have different lengths, and
`order_keys` has integers that order as logits do.
"""
