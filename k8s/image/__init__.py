"""Owns the image without a Docker daemon: built by running the Dockerfile's steps, read back, and started.
Never pushes it anywhere."""
