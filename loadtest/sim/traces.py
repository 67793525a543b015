"""Owns the location of the recorded traces, and the jobs that are made from their requests.
Never contains a trace: traces are kept outside the project, under their own licences."""

from __future__ import annotations

import os
from pathlib import Path

from loadtest.server import ROOT
from loadtest.sim.workload import Job
from loadtest.traces import read_trace

TRACES = {
    "azure_conv": "azure23_conv.csv",
    "azure_code": "azure23_code.csv",
    "mooncake_conv": "mooncake_conv.jsonl.gz",
    "mooncake_synth": "mooncake_synth.jsonl.gz",
}


class TraceMissingError(FileNotFoundError):
    """A trace is not where it is expected."""


def trace_path(name: str) -> Path:
    """Return the path of a trace in `traces/` of the folder CHUNKSERVE_DATA, or else of ../shared/data.

    Raises:
        TraceMissingError: the file does not exist.
    """
    folder = Path(os.environ.get("CHUNKSERVE_DATA", ROOT.parent / "shared" / "data"))
    path = folder / "traces" / TRACES[name]
    if not path.is_file():
        raise TraceMissingError(f"The trace {name} is not at {path}; CHUNKSERVE_DATA names the folder that holds it.")
    return path


def trace_jobs(name: str) -> list[Job]:
    """Return the requests of one of TRACES, in order of arrival, the first at 0 s. A request without answer tokens gets
    one, since the engine samples at least one."""
    rows = read_trace(trace_path(name)).rows
    return [Job(row.at_s, max(row.prompt_tokens, 1), max(row.output_tokens, 1), row.blocks) for row in rows]
