"""One file for each family of models: how it reads config.json, and what its tensors are called.
Importing this package imports nothing else."""
