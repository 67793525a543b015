"""Runs the task through one library: tasks.py NAME URL MODEL, in the project's directory, in the clients' environment.
Never imports anything of ours, nor a library but that one."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Do the task through one library, in the project's directory.")
    for each in ("name", "url", "model"):
        parser.add_argument(each)
    given = parser.parse_args()
    modules = [import_module(name) for name in ("sdk_tasks", "agent_tasks", "form_tasks", "team_tasks")]
    tasks: list[Callable[[str, str], str]] = [vars(each)[given.name] for each in modules if given.name in vars(each)]
    print(tasks[0](given.url, given.model))
