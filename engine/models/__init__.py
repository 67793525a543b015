"""Model definitions, one file for each family; `registry` maps a checkpoint's architecture to one of them.
Importing this package imports nothing else."""
