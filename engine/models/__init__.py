"""Model definitions, one file per family; `registry` maps a checkpoint's architecture to a family.
Importing this package imports nothing else."""
