"""Multiplies by weights of 8 and 4 bits: `multiply` and `fp8` have kernels, `linear` chooses a launch by the rows."""
