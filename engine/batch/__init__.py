"""A step's rows as tensors, and what happens to their logits.

`row_order` puts rows into the kernels' order and makes the step's output, `inputs` builds their tensors,
`logit_controls` and `grammar` change logits, `sampler` draws tokens, and `logprobs` reports them.
"""
