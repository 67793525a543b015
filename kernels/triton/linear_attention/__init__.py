"""Linear attention, whose state a request keeps.

`causal_conv` is the convolution before it, and `delta_rule` the gated delta rule itself.
"""
