"""Runs plans on a device. `executor` is for the CPU and is the reference; `gpu` has the executor for a GPU.

Both keep `answers` from step to step. `device` is the interface to either device, and `draft_model` runs a second,
smaller model.
"""
