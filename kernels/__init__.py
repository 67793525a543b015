"""Owns the numerical operations: a table of callables chosen once (`ops`), and what defines them (`reference`).
Holds this docstring and nothing else: transformers probes for another package of this name and reads its attributes."""
