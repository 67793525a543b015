"""Implements the `serve` command: checks before the start, Ray Serve's environment, and a clean shutdown.

Start with `cli`. `preflight` and `this_machine` check, `run` starts and waits, and `shutdown` drains.

Never imports Ray Serve before the environment is set.
"""
