"""Runs each operation of the forward pass as it comes, on torch's tensors.

`forward` is the pass, and `ops` holds the operator tables that it runs on: the reference, torch on a CPU, torch on any
device. FlashAttention and Triton derive their tables from these. `rewind` takes recurrent states back past rejected
drafts.
"""
