"""The forward pass that runs each operation as it comes, on torch's tensors.

`forward` is the pass, and `ops` has the tables of operators that it runs on: the reference, torch on a CPU, torch on
any device. FlashAttention and Triton make tables of their own from these. `rewind` takes recurrent states back past
rejected drafts.
"""
