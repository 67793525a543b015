"""Owns the `serve` command: checks before it, what Ray Serve finds in its environment, a clean end after it.
Never imports Ray Serve before the environment is set."""
