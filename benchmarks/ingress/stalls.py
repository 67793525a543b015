"""Owns the benchmark of stalls: how long other streams and /health wait while an ingress reads a large request.
Never measures an engine or Ray: the ingress runs in its own process, with an engine of constant pace."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ingress.bodies import CASES, MODEL, Case
from benchmarks.ingress.server import STEP_S
from benchmarks.machine import machine
from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL
from serve_app.api.text.tokenizer import Tokenizer

NUM_STREAMS = 8
PROBE_PAUSE_S = 0.005
SETTLE_S = 0.3
STREAM_TOKENS = 8000
"""Tokens of a background stream, which take 160 s. Every server's context is large enough for them."""
LONGEST_S = 150.0
IDLE = "nothing"


@dataclass(slots=True)
class Seen:
    """Measured times in milliseconds, and the statuses of the large requests."""

    gaps: list[float] = field(default_factory=list)
    healths: list[float] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)


def _request(method: str, path: str, body: bytes = b"") -> bytes:
    lines = (
        f"{method} {path} HTTP/1.1",
        "host: bench",
        "content-type: application/json",
        f"content-length: {len(body)}",
    )
    return "\r\n".join((*lines, "", "")).encode() + body


async def _answer(reader: asyncio.StreamReader) -> int:
    """Read a whole answer with a content-length, and return its status."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = head.partition("content-length:")[2].split("\r\n")[0]
    await reader.readexactly(int(length))
    return int(head.split()[1])


async def _stream(port: int, seen: Seen) -> None:
    """Record the gaps of one stream until cancelled. A read has one token, or several that waited together."""
    fields = {"model": MODEL, "prompt": "a", "max_tokens": STREAM_TOKENS, "stream": True}
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_request("POST", "/v1/completions", json.dumps(fields).encode()))
    last = None
    try:
        while data := await reader.read(65_536):
            now = time.perf_counter()
            if last is not None and b"data:" in data:
                seen.gaps.append(1000 * (now - last))
            last = now
        raise RuntimeError("a background stream ended")
    finally:
        writer.close()


async def _probe(port: int, seen: Seen) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while True:
            begun = time.perf_counter()
            writer.write(_request("GET", "/health"))
            if await _answer(reader) != 200:
                raise RuntimeError("/health does not return 200")
            seen.healths.append(1000 * (time.perf_counter() - begun))
            await asyncio.sleep(PROBE_PAUSE_S)
    finally:
        writer.close()


async def _send(port: int, case: Case, seen: Seen) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begun = time.perf_counter()
    writer.write(_request("POST", case.path, case.body))
    seen.statuses.append(await _answer(reader))
    seen.answers.append(1000 * (time.perf_counter() - begun))
    writer.close()


async def measure(port: int, case: Case | None, at_once: int) -> dict[str, Any]:
    """Measure the waits of other requests while `at_once` large requests are sent and answered."""
    seen = Seen()
    others = [asyncio.ensure_future(_stream(port, seen)) for _ in range(NUM_STREAMS)]
    others.append(asyncio.ensure_future(_probe(port, seen)))
    try:
        await asyncio.sleep(SETTLE_S)
        seen.gaps.clear()
        seen.healths.clear()
        async with asyncio.timeout(LONGEST_S):
            if case is None:
                await asyncio.sleep(2.0)
            else:
                await asyncio.gather(*(_send(port, case, seen) for _ in range(at_once)))
        await asyncio.sleep(SETTLE_S)
        if ended := next((task for task in others if task.done()), None):
            ended.result()
    finally:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    return _figures(seen)


def _figures(seen: Seen) -> dict[str, Any]:
    figures: dict[str, Any] = {"statuses": sorted(set(seen.statuses))}
    for name, values in (("gap", seen.gaps), ("health", seen.healths)):
        figures |= {f"{name}_p50_ms": round(statistics.median(values), 1), f"{name}_max_ms": round(max(values), 1)}
    return figures | {"answer_max_ms": round(max(seen.answers, default=0.0))}


@contextmanager
def served(directory: Path, max_model_len: int) -> Iterator[int]:
    """Run an ingress in its own process, and yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.ingress.server", str(directory), str(port), str(max_model_len)]
    with subprocess.Popen(command) as server:
        try:
            _wait_for(port, server)
            yield port
        finally:
            server.terminate()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if server.poll() is not None:
            raise RuntimeError("the server has ended")
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError("the server does not listen")


def run(contexts: Sequence[int], names: Sequence[str], counts: Sequence[int], rounds: int) -> dict[str, Any]:
    """Measure all cases on a server for each context, with several rounds each."""
    directory = prepare_model(DEFAULT_MODEL)
    tokenizer = Tokenizer.from_dir(directory)
    cells = []
    for context in contexts:
        with served(directory, context) as port:
            for name in (IDLE, *names):
                case = None if name == IDLE else CASES[name](tokenizer)
                for at_once in counts if case else (0,):
                    found = [asyncio.run(measure(port, case, at_once)) for _ in range(rounds)]
                    cells.append({"max_model_len": context, "case": name, "at_once": at_once, **_spread(found)})
                    print(json.dumps(cells[-1]), flush=True)
    config = {"streams": NUM_STREAMS, "step_ms": 1000 * STEP_S, "rounds": rounds, "model": DEFAULT_MODEL}
    return {"benchmark": "ingress_stalls", **machine(), "config": config, "cells": cells}


def _spread(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return median, minimum and maximum over the rounds."""
    spread: dict[str, Any] = {"statuses": sorted({status for figures in found for status in figures["statuses"]})}
    for key in found[0].keys() - spread.keys():
        values = [figures[key] for figures in found]
        spread[key] = [statistics.median(values), min(values), max(values)]
    return dict(sorted(spread.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ingress.stalls",
        description="Measure how long other streams and /health wait while an ingress reads something large. The "
        "ingress runs in a process of its own, with an engine of constant pace; neither Ray nor a model is involved.",
    )
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[8192, 131_072], help="max_model_len of the servers to measure"
    )
    parser.add_argument(
        "--cases", nargs="+", choices=list(CASES), default=list(CASES), help="what the ingress reads; all if not given"
    )
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 8], help="numbers of large requests at a time")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all cases (%(default)s)")
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file")
    options = parser.parse_args()
    document = run(options.contexts, options.cases, options.at_once, options.rounds)
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
