"""Multiplies by weights of 8 and 4 bits: `multiply` has the kernels, `linear` chooses their launch by the rows."""
