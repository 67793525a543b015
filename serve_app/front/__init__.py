"""Implements the commands `serve` and `chunkserve`: checks before the start, Ray Serve's environment, a clean shutdown.

Start with `cli`, which is `serve`; `command` is `chunkserve`. `preflight` and `this_machine` check, `run` starts and
waits, and `shutdown` drains.

Never imports Ray Serve before the environment is set.
"""
