"""The `serve` command: checks before it, what Ray Serve finds in its environment, and a clean end after it.

`cli` is the entry, `preflight` and `this_machine` check, `run` starts and waits, and `shutdown` drains.

Never imports Ray Serve before the environment is set.
"""
