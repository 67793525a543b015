"""Implements the operations for GPUs in Triton; `kernels.triton.ops.TRITON` is their table.

`forward` runs a model on them. Each package has one kind of operation, and all of them use `shared`. Importing this
package imports nothing else: its modules need the package `triton`, which not every machine has.
"""
