"""One file for each family of models: how it reads config.json, and the names of its tensors.
Importing this package imports nothing else."""
