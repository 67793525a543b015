"""Holds what all Triton kernels share: how they are launched, how a program finds its row, and how it reads weights.

`launch` launches them, compiled or interpreted. `tiles` finds a program's row where rows have different lengths, and
`order_keys` has integers that order as logits do. `stored_numbers` widens numbers of 8 bits, `narrow_cache` is the
layout of K and V that are kept in such, `pack` lays weights of fewer bits out, and `weights` multiplies by them.
"""
