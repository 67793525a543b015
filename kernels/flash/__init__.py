"""Runs attention on FlashAttention, where one of its packages is installed.

`packages` says which releases are supported, and why one cannot run this model. `attention` calls the one that can.
Importing this package imports none of them.
"""
