"""Multiplies by weights of 8 and 4 bits (`multiply`, `fp8`, and `linear`, which chooses) and few rows by any other."""
