"""Running a plan on a device. `executor` is the CPU's and the reference, `gpu` has the GPU's.

Both keep `answers` from step to step. `device` is what the engine asks of either, and `draft_model` runs a second,
smaller model.
"""
