"""Implements the operations in C++, and records a model's forward pass once: a step is then one call.

`library` compiles the C++ here for this machine, `program` records a model's operations and runs them,
`low_rank` packs LoRA adapters for it, and `sampling` draws tokens. A `wheel` has the library for all `levels` of
processors. Importing this package imports and compiles nothing.
"""
