"""Describes the rows of a step to the kernels. Nothing here computes.

`step` says where each row's tokens and states lie, and `device` holds the same in tensors on a GPU. `sampled_row` says
how a row's next token is chosen, and `adapter_tokens` in which order tokens with LoRA adapters are computed. `integers`
joins the many short lists that rows consist of.
"""
