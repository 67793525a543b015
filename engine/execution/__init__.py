"""Running a plan on a device. `executor` is the CPU's and the reference, `gpu` has the GPU's.

`device` is what the engine asks of either, and `draft_model` runs a second, smaller model.
"""
