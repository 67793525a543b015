"""Owns the simulator: our scheduler, router, gate, migration and autoscaler on a clock of its own, and what comes out.
Never measures: every figure that it gives is simulated, from step times that were measured elsewhere."""
