"""Holds what LoRA adapters add to a matrix product: two products for each tile of tokens that have the same adapter.

`shrink` goes from inputs to ranks, and `expand` from ranks to outputs.
"""
