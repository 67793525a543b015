"""Owns runs of many of the project's commands, each in a process forked once torch is imported: most of them need it,
and it takes seconds.
Never runs what starts threads or servers: a fork has none of its parent's threads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from loadtest.server import ROOT

# What a process has run, it need not import again: the words after the first of a group are run in the same process.
_RUN_ALL = """
import contextlib, io, json, os, runpy, sys
import torch

def outcome(words):
    out, errors, status = io.StringIO(), io.StringIO(), "no exit"
    sys.argv = words
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
        except BaseException as error:
            status = repr(error)
    return status, out.getvalue(), errors.getvalue()

found = []
for group in json.load(sys.stdin):
    read, write = os.pipe()
    if os.fork() == 0:
        with open(write, "w") as pipe:
            json.dump([outcome(words) for words in group], pipe, default=repr)
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        found.append(json.load(pipe))
    os.wait()
json.dump(found, sys.stdout)
"""


class Ended(NamedTuple):
    status: object
    """Its exit status; a text if it ended in another way."""
    out: str
    errors: str


def run_forked(groups: Sequence[Sequence[Sequence[str]]], directory: Path) -> list[list[Ended]]:
    """Run in `directory`, as `python -m` does, each group's commands one after the other in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}){_RUN_ALL}"],
        input=json.dumps(groups),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=directory,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [[Ended(*one) for one in group] for group in json.loads(done.stdout)]
