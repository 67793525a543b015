"""Operations for GPUs, written in Triton; `kernels.triton.ops.TRITON` is their table.
Importing this package imports nothing else: its modules need the package `triton`, which not every machine has."""
