"""Owns the measurement of streams whose engine is killed: how soon they go on at another one, with and without a disk
tier that both engines share.
Never lets a changed answer pass: every token must be that of a run in which nobody was killed."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from benchmarks.results import write_whole
from benchmarks.serving.streams import Stream, Streams
from loadtest.server import Server, machine, serve_run, session_members

WITH, WITHOUT = "disk", "none"
TEXTS = {WITH: "a disk tier that both share", WITHOUT: "none: computed again"}
REPLICA = "ray::ServeReplica"
BEGIN_S, GO_ON_S, END_S = 900.0, 900.0, 30.0
"""How long all streams may take to begin, to go on, and to be told of by the server once they were left."""
AIM = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Sessions that stream at the same time. Sizes are in tokens."""

    sessions: int = 50
    prompt: int = 1500
    answer: int = 400
    begun: int = 16
    """What each has got of its answer when an engine is killed."""
    after: int = 8
    """What each must get afterwards."""
    seed: int = 0
    tokens: tuple[int, int] = (1000, 40_000)
    """Prompts are drawn from these ids."""
    disk_gib: float = 8.0
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the engines."""

    def bodies(self) -> list[dict[str, Any]]:
        """Return the requests: greedy, of random tokens, the same in every run."""
        draw = random.Random(self.seed)
        prompts = ([draw.randrange(*self.tokens) for _ in range(self.prompt)] for _ in range(self.sessions))
        fixed = {"model": "smollm2-135m-instruct", "max_tokens": self.answer, "temperature": 0, "ignore_eos": True}
        return [{**fixed, "prompt": prompt} for prompt in prompts]

    def application(self, disk: str | None) -> dict[str, Any]:
        """Return the application: two engines of one thread. disk: the directory of their disk tier."""
        length = self.prompt + self.answer
        tiers = {} if disk is None else {"kv_tiers": {"disk_path": disk, "disk_gib": self.disk_gib}}
        engine = {
            "max_model_len": length,
            "max_num_seqs": self.sessions,
            "num_kv_blocks": self.sessions * (length // 16 + 2),  # each engine could hold them all
            "num_threads": 1,
            "speculative": {"method": "none"},
        }
        args = {
            "model": "smollm2-135m-instruct",
            "engine_replicas": 2,
            "engine_num_cpus": 0.5,
            "migration_timeout_s": GO_ON_S,
            "engine": {**engine, **tiers, **self.engine},
        }
        return {"import_path": "serve_app.app:build", "args": args}


async def undisturbed(load: Load) -> list[list[int]]:
    """Return the whole answers of a server in which no engine is killed."""
    with serve_run(load.application(None), {}) as server:
        await _until_engines(server, 2)
        streams = Streams(server.port, load.bodies(), "undisturbed")
        await streams.until(lambda stream: stream.is_complete, BEGIN_S)
    return [stream.token_ids for stream in streams.all]


async def kill_one(load: Load, disk: str | None, expected: Sequence[Sequence[int]], name: str) -> dict[str, Any]:
    """Kill one of two engines under all streams, and return the figures of those that moved."""
    with serve_run(load.application(disk), {}) as server:
        await _until_engines(server, 2)
        streams = Streams(server.port, load.bodies(), name)
        await streams.until(lambda stream: len(stream.token_ids) >= load.begun, BEGIN_S)
        had = {stream.request_id: len(stream.token_ids) for stream in streams.all}
        os.kill(random.Random(name).choice(_engines(server)), signal.SIGKILL)
        at = time.monotonic()
        enough = load.after + 2  # one or two may have been on their way
        await streams.until(lambda s: len(s.token_ids) >= min(had[s.request_id] + enough, load.answer), GO_ON_S)
        await streams.leave()
        moves = [await _num_moves(server, stream) for stream in streams.all]
        loaded = await _loaded_blocks(server)
    check(streams.all, expected)
    return {**figures(streams.all, moves, at), "loaded_blocks": loaded}


def check(streams: Sequence[Stream], expected: Sequence[Sequence[int]]) -> None:
    """Check each token against the undisturbed answer.

    Raises:
        RuntimeError: one differs.
    """
    for stream, whole in zip(streams, expected, strict=True):
        if stream.token_ids != list(whole[: len(stream.token_ids)]):
            raise RuntimeError(f"{stream.request_id} has other tokens than undisturbed")


def figures(streams: Sequence[Stream], moves: Sequence[int], at: float) -> dict[str, Any]:
    """Return the seconds from the kill until streams went on, for those that moved.

    Raises:
        RuntimeError: none has moved, or one more than once.
    """
    if max(moves, default=0) != 1:
        raise RuntimeError(f"the streams moved so often: {moves}")
    waits = [stream.resumed(at) for stream, count in zip(streams, moves, strict=True) if count]
    found = [wait for wait in waits if wait is not None]
    return {"moved": len(found), "median_s": statistics.median(found), "least_s": min(found), "most_s": max(found)}


def _engines(server: Server) -> list[int]:
    """Return the process ids of the engine replicas."""
    found = []
    for process in session_members(server.process.pid):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # ended meanwhile
            continue
        if REPLICA in command and ":Engine" in command:
            found.append(int(process.name))
    return sorted(found)


async def _until_engines(server: Server, count: int) -> None:
    deadline = time.monotonic() + BEGIN_S
    while len((await _get(server, "/load") or {}).get("engines", ())) < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server does not have {count} engines")
        await asyncio.sleep(0.2)


async def _num_moves(server: Server, stream: Stream) -> int:
    """Return how often a stream moved. The server knows it soon after the stream was left."""
    deadline = time.monotonic() + END_S
    while (timing := await _get(server, f"/v1/requests/{stream.request_id}/timing")) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server does not know {stream.request_id}")
        await asyncio.sleep(0.1)
    return int(timing["migrations"])


async def _loaded_blocks(server: Server) -> int:
    """Return how many blocks of KV the engines have loaded from tiers. The server says so once it has noticed that one
    of them is gone."""
    deadline = time.monotonic() + END_S
    while (load := await _get(server, "/load")) is None:
        if time.monotonic() > deadline:
            raise RuntimeError("the server does not say what its engines have loaded")
        await asyncio.sleep(0.2)
    return sum(tier["hit_blocks"] for engine in load["engines"] for tier in engine["tiers"])


async def _get(server: Server, path: str) -> dict[str, Any] | None:
    """Return a JSON body; None if there is none."""

    def get() -> dict[str, Any] | None:
        try:
            with urllib.request.urlopen(f"{server.url}{path}", timeout=30) as response:
                found: dict[str, Any] = json.load(response)
                return found
        except (OSError, HTTPException):  # a refusal too, and a connection that ended
            return None

    return await asyncio.to_thread(get)


def measure(load: Load, rounds: int, out: Path | None = None, directory: Path | None = None) -> dict[str, Any]:
    """Kill an engine with and without the tier in turn, once each in a round. out: gets the rounds that are done."""
    expected = asyncio.run(undisturbed(load))
    found: dict[str, list[dict[str, Any]]] = {WITHOUT: [], WITH: []}
    document = {}
    for number in range(rounds):
        for name in (WITHOUT, WITH) if number % 2 == 0 else (WITH, WITHOUT):
            with tempfile.TemporaryDirectory(prefix="killed-", dir=directory) as path:
                disk = path if name == WITH else None
                found[name].append(asyncio.run(kill_one(load, disk, expected, f"{name}-{number}")))
            print(name, found[name][-1], flush=True)
        document = document_of(load, found)
        if out:
            write_whole(out, document)
    return document


def document_of(load: Load, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the document of whole rounds, by the tier that they had."""
    ratios = [a["median_s"] / b["median_s"] for a, b in zip(found[WITH], found[WITHOUT], strict=True)]
    return {
        "benchmark": "killed",
        **machine(),
        "rounds": len(ratios),
        "load": {name: getattr(load, name) for name in ("sessions", "prompt", "answer", "begun", "seed")},
        "cells": [{"tier": name, "runs": list(runs)} for name, runs in found.items()],
        "ratio": [statistics.median(ratios), min(ratios), max(ratios)],
    }


def table(document: Mapping[str, Any]) -> str:
    """Render the table of docs/benchmarks/kv-tiers.md: seconds until moved streams went on; medians over the runs, with
    the least and the most of them in brackets."""
    if not document.get("cells"):
        return "Not measured yet."
    sizes = document["load"]
    told = (
        f"{sizes['sessions']} sessions, prompts of {sizes['prompt']:,} tokens, {document['rounds']} round"
        f"{'s' * (document['rounds'] != 1)}; an engine "
        f"is killed when each stream has {sizes['begun']} tokens."
    )
    lines = [told, "", "| tier | streams that moved | median, s | first, s | last, s |", "|---|--:|--:|--:|--:|"]
    for cell in document["cells"]:
        columns = [[run[name] for run in cell["runs"]] for name in ("moved", "median_s", "least_s", "most_s")]
        moved, *times = columns
        shown = " | ".join(f"{statistics.median(t):.1f} ({min(t):.1f}–{max(t):.1f})" for t in times)
        lines.append(f"| {TEXTS[cell['tier']]} | {min(moved)}–{max(moved)} | {shown} |")
    median, least, most = document["ratio"]
    return "\n".join(
        [*lines, "", f"Median with the tier ÷ without: {median:.2f} ({least:.2f}–{most:.2f}); aim ≤ {AIM}."]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.killed",
        description="Kill one of two engines of a server under long streams, with and without a disk tier that both "
        "share, and measure how soon the streams go on. The last line is one JSON document.",
    )
    parser.add_argument("--sessions", type=int, default=Load().sessions, help="streams at a time (%(default)s)")
    parser.add_argument("--prompt", type=int, default=Load().prompt, help="tokens of each prompt (%(default)s)")
    parser.add_argument("--answer", type=int, default=Load().answer, help="most tokens of each answer (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="engines killed with and without the tier (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 1_000_000, help="the prompts' seed; another each time"
    )
    parser.add_argument("--directory", type=Path, help="where files of the tier go; the system's temporary directory")
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file, after each round")
    options = parser.parse_args(arguments)
    load = Load(sessions=options.sessions, prompt=options.prompt, answer=options.answer, seed=options.seed)
    document = measure(load, options.rounds, options.out, options.directory)
    print(table(document))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
