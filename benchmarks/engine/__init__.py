"""Measurements of the engine without a server: steps, mixed loads, memory, speculation, the scheduler alone, a GPU."""
