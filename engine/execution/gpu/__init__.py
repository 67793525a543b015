"""Runs plans on a GPU: captured steps, inputs copied while a step runs, sampling on the device.

`executor` launches steps, `model` runs or replays them, `cuda_graph_buckets` chooses the captured sizes, `adapters`
keeps LoRA adapters in slots, and `memory` divides the GPU's memory.
"""
