"""The serving path: OpenAI's HTTP API on Ray Serve in front of engine replicas.
Importing this package imports nothing else."""
