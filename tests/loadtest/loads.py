"""Owns loads of tests: the command in a process of its own, against a server in the test's process.
Never judges a generator by a test machine: its limits are lifted unless a test sets them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.server import ROOT
from tests.loadtest.fake_openai import FakeServer, listening
from tests.support.seeds import run_seed

LONGEST_S = 120
LENIENT = ["--max-lag-ms", "60000", "--max-cpu", "100000", "--goal", ""]
"""Limits for a machine that tests share, which is slow now and then."""


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    output: str
    out: Path

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "report.json").read_text())
        return found

    @property
    def page(self) -> str:
        return (self.out / "report.html").read_text()


@asynccontextmanager
async def started(command: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a command in the root of the repository; end it with the block, by SIGTERM."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.communicate()


async def run(command: Sequence[str], out: Path) -> Ended:
    async with asyncio.timeout(LONGEST_S), started(command) as process:
        output, _ = await process.communicate()
        assert process.returncode is not None
        return Ended(process.returncode, output.decode(), out)


async def load(server: FakeServer, out: Path, *arguments: str, module: str = "loadtest.load") -> Ended:
    """Load the server with lenient limits and the run's seed; `arguments` come after these, so that they win."""
    async with listening(server) as port:
        url = ["--url", f"http://127.0.0.1:{port}", "--out", str(out), "--seed", str(run_seed())]
        return await run([sys.executable, "-m", module, *url, *LENIENT, *arguments], out)
