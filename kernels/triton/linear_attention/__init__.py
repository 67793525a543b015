"""Computes linear attention, which keeps a recurrent state for each request.

`causal_conv` is the convolution before it, and `delta_rule` is the gated delta rule itself.
"""
