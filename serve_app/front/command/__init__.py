"""Implements the `chunkserve` command, with one file for each subcommand.

`__main__` lists them. `serve` and `check` share `problems`, which finds what is wrong with a config, and `base_config`
is what a server gets that names no config. `convert` reads its file by `llm_config_file`. `api` asks a running server.

Never imports torch or Ray before a subcommand needs them, so that `--help` answers at once.
"""
