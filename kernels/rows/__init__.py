"""The rows of a step, as kernels are told of them. Nothing here computes.

`step` says where each row's tokens and states lie, and `device` has the same in tensors on a GPU. `sampled_row` says
how a row's next token is chosen. `integers` joins the many short lists that rows consist of.
"""
