"""Owns the numerical operations: tables of callables (`eager.ops`), one of them chosen, and a definition (`reference`).
Holds only this docstring: transformers probes for another package of this name and reads its attributes."""
