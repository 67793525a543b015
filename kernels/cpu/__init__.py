"""Operations for CPUs. Importing this package imports nothing else."""
