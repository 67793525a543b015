"""Makes the reference of the command line: the targets of `make`, and the `--help` of each program.
Never describes a program in its own words, except `serve`, whose help is Ray's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from serve_app.front.command.__main__ import COMMANDS, PROG

ROOT = Path(__file__).resolve().parents[1]

INTRODUCTION = """\
# Command line

Written by `make docs`. Programs run in the environment that `make install` creates: `.venv/bin/...`.

## serve

Ray Serve's own command. In a checkout's environment, `make install` puts a script in its place: before `serve run` [the
config is checked](start.md), HAProxy is put in front, and at the end streams finish. Where chunkserve was installed
from a wheel, `serve` is Ray's, and `chunkserve serve config.yaml` does all of this: [Install](../how-to/install.md).

| command | what it does |
|---|---|
| `serve run config.yaml` | Checks the config, starts Ray and the server, and waits. `--verbose` shows their output. |
| `serve deploy config.yaml` | Applies a config to the running server. |
| `serve status` | Shows the state of the running server's applications. |
| `serve config` | Shows the running server's config. |
| `serve shutdown` | Stops the running server. |
| `serve --version` | Shows the versions of chunkserve and Ray. |

If several servers run, `--address` chooses one. All other options are Ray's: `serve run --help`.

`chunkserve serve`, [below](#chunkserve-serve), starts the same server from a model's name and a few options, without a
config.
"""

VARIABLES = {
    "CHUNKSERVE_API_KEY": "API key that `chunkserve status`, `chat` and `bench` send, and load tests without `--keys`.",
    "CHUNKSERVE_CACHE": "Directory of prepared models. Unset: `~/.cache/chunkserve`.",
    "CHUNKSERVE_KERNELS_CACHE": "Directory of compiled kernels. Unset: one in the user's cache directory.",
    "CHUNKSERVE_VERBOSE": "`1`: the same as `serve run --verbose`.",
    "CHUNKSERVE_MAX_CONNECTIONS_PER_SOURCE": "Maximum connections from one source. 0: no limit. "
    "See [HTTP limits](http-limits.md).",
    "CHUNKSERVE_CORS": "Web pages that may read what HAProxy and Ray Serve refuse. "
    "See [Run on an existing cluster](../how-to/existing-cluster.md).",
    "CHUNKSERVE_HAPROXY_BINARY": "HAProxy program to run instead of Ray's.",
    "CHUNKSERVE_TRITON_TUNING": "How Triton's kernels choose a configuration on a GPU. `keep` (unset): timed once, "
    "kept on disk. `forget`: timed in each process. A number: that one, or the next that fits the GPU, untimed.",
    "CHUNKSERVE_DATA": "Directory with traces for the simulator's studies.",
    "CHUNKSERVE_TEST_SEED": "Seed of the random tests. Unset: a fixed one.",
}
"""Variables that users may set. Programs set others for each other."""

COMMAND = "serve_app.front.command"
PROGRAMS = (
    COMMAND,
    "engine.checkpoints.prepare",
    "serve_app.auth",
    "loadtest.load",
    "loadtest.find_rate",
    "loadtest.sim.load",
    "benchmarks.engine.gpu",
    "benchmarks.engine.mixed",
    "benchmarks.engine.mixture",
    "benchmarks.engine.memory",
    "benchmarks.engine.kv_moves",
    "benchmarks.engine.ranks",
    "benchmarks.engine.step",
    "benchmarks.engine.step_model",
    "benchmarks.engine.targets",
    "benchmarks.engine.shapes",
    "benchmarks.engine.scheduler",
    "benchmarks.engine.kv_tiers",
    "benchmarks.engine.speculation",
    "benchmarks.versions",
    "benchmarks.kernels",
    "benchmarks.ingress.stalls",
    "benchmarks.routing",
    "benchmarks.tensor_parallel.run",
    "benchmarks.serving.killed",
    "benchmarks.transport.run",
    "benchmarks.peers.run",
    "benchmarks.peers.beside",
    "benchmarks.peers.llama_cpp",
    "benchmarks.peers.agreement",
    "benchmarks.peers.chart",
    "tests.gpu.first_hour",
    "tests.gpu.hour.report",
    "k8s.drain",
    "k8s.validate",
    "k8s.image",
    "k8s.sbom",
)
"""Programs for users and operators, in the order of the page."""
WITH_SUBCOMMANDS = (COMMAND, *(f"{COMMAND} {name}" for name in COMMANDS), *PROGRAMS[1:])

_OURS = WITH_SUBCOMMANDS[: 1 + len(COMMANDS)]

# Each program runs in its own process, forked after importing torch, which most of them need and which takes seconds.
_ALL = """
import contextlib, io, json, os, runpy, sys
import torch

def help_of(program):
    out = io.StringIO()
    module, *words = program.split()
    sys.argv = [module, *words, "--help"]
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    return out.getvalue()

found = {}
for program in json.load(sys.stdin):
    read, write = os.pipe()
    if os.fork() == 0:
        with open(write, "w") as pipe:
            pipe.write(help_of(program))
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        found[program] = pipe.read()
    os.wait()
json.dump(found, sys.stdout)
"""


def render() -> str:
    """Render the page as Markdown."""
    return "\n".join([INTRODUCTION, *_targets(), *_variables(), *_programs(help_of(WITH_SUBCOMMANDS))])


def _targets() -> Iterator[str]:
    yield from ("## make", "", "| target | what it does |", "|---|---|")
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, about in re.findall(r"^([\w-]+):.*?## (.*)$", text, re.MULTILINE):
        yield f"| `make {name}` | {about.replace('|', '&#124;')} |"
    yield ""


def _variables() -> Iterator[str]:
    yield from ("## Environment", "", "| variable | meaning |", "|---|---|")
    for name, meaning in VARIABLES.items():
        yield f"| `{name}` | {meaning} |"
    yield ""


def _programs(helps: dict[str, str]) -> Iterator[str]:
    for program, text in helps.items():
        usage, _, rest = text.partition("\n\n")  # Python releases wrap the usage differently
        assert usage.startswith("usage: "), program
        name = program.replace(COMMAND, PROG) if program in _OURS else f"python -m {program}"
        yield from (f"## {name}", "", "```text", rest.rstrip(), "```", "")


def help_of(programs: Sequence[str]) -> dict[str, str]:
    """Run each program with `--help` and return its output."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}){_ALL}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(list(programs)),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**_environment(), "COLUMNS": "100"},
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("LINES", "COLUMNS", "NO_COLOR")}
