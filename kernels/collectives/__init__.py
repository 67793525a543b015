"""The ranks that compute one model together: what they add up, collect and tell each other within a step.

`group` has the contract; the others implement it.

Never knows a model or a plan: tensors and bytes only.
"""
