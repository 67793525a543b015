"""Multiplies by weights of 8 and 4 bits (`multiply`, `fp8`, `linear`), and few rows by those of 16 (`few_rows`)."""
