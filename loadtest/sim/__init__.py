"""Owns the simulator: our scheduler, router, gate, migration and autoscaler on a simulated clock, and its studies.
Never measures: every figure is simulated, from step times that were measured elsewhere."""
