"""`chunkserve bench` sends a load to a server and says in a table what became of it, however it ends."""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
from pathlib import Path

import pytest

from loadtest.server import ROOT, free_port
from loadtest.slo import BROKEN, MISSED, PASSED
from loadtest.table import aligned
from loadtest.workloads import WORKLOADS
from tests.docsite.blocks import BLOCKS
from tests.loadtest.fake_openai import FakeServer, listening
from tests.loadtest.loads import LENIENT, LONGEST_S, Ended, run, started
from tests.support.chunkserve import COMMAND, chunkserve, refusal

pytestmark = [pytest.mark.anyio, pytest.mark.server]

SHORT = ("--seconds", "1", "--rate", "8", "--seed", "1", *LENIENT)
"""A smoke load of seven requests."""


async def bench(server: FakeServer, out: Path, *arguments: str) -> Ended:
    async with listening(server) as port:
        url = f"http://127.0.0.1:{port}/v1"
        return await run([*COMMAND, "bench", url, *arguments, "--json", str(out / "report.json")], out)


async def test_a_load_that_passes_shows_a_row_for_its_point_and_writes_the_report(tmp_path: Path) -> None:
    server = FakeServer(step_s=0.02)
    found = await bench(server, tmp_path, *SHORT)
    assert found.code == PASSED, found.output
    assert len(server.bodies) == 7
    head, row, *_ = [line for line in found.output.splitlines() if line.startswith(("  ", "smoke  "))]
    assert head.split()[:4] == ["sent", "good", "failed", "refused"]
    assert row.split()[:5] == ["smoke", "7", "7", "0", "0"]
    assert "in flight" in found.output, "there is progress without a terminal, too"
    assert "\x1b" not in found.output
    assert found.output.rstrip().endswith("passed")
    assert found.document["points"][0]["figures"]["ok"] == 7


async def test_a_limit_that_is_missed_is_said_and_is_the_status(tmp_path: Path) -> None:
    found = await bench(FakeServer(), tmp_path, *SHORT, "--limits", "ttft_p99_ms<=0.001", "--workers", "2")
    assert found.code == MISSED
    assert "missed: smoke: ttft_p99_ms <= 0.001" in found.output
    assert found.document["generator"]["workers"] == 2


async def test_a_report_of_an_earlier_load_is_not_taken_for_that_of_one_that_made_none(tmp_path: Path) -> None:
    """Regression guard: with `--out`, a load that was cut off at once told the earlier one's table, and passed."""
    kept = str(tmp_path / "kept")
    assert (await bench(FakeServer(step_s=0.02), tmp_path, *SHORT, "--out", kept)).code == PASSED
    server = FakeServer()
    found = await bench(server, tmp_path, *SHORT, "--out", kept, "--at-most", "0.05")
    assert (found.code, server.bodies) == (BROKEN, [])
    assert "passed" not in found.output


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
async def test_a_load_that_is_interrupted_shows_what_there_was_and_leaves_no_process(
    tmp_path: Path, signum: signal.Signals
) -> None:
    server = FakeServer(step_s=0.05)  # some answers have ended by then, and some are cut off
    async with listening(server) as port:
        command = [*COMMAND, "bench", f"http://127.0.0.1:{port}", "--seconds", "600", "--rate", "5", *LENIENT]
        async with started(command) as process, asyncio.timeout(LONGEST_S):
            while len(server.bodies) < 15:  # workers report what they have once a second
                assert process.returncode is None
                await asyncio.sleep(0.1)
            process.send_signal(signum)
            output, _ = await process.communicate()
    assert process.returncode == 128 + signum
    told = output.decode()
    assert "Traceback" not in told
    assert "broken" not in told, "our own end is no failure of the server's"
    *_, row, ended, last = told.splitlines()
    _, sent, good, failed, refused, *_ = row.split()
    assert (int(sent), int(failed), int(refused)) == (int(good), 0, 0)
    assert int(sent) > 0
    cut = r"; \d+ unfinished requests, which this cut off, are left out"
    assert re.fullmatch(rf"ended early: after \d+ s of a load of 600 s{cut}", ended)
    assert last == "incomplete, with code 5"


async def test_a_load_that_takes_too_long_is_ended_with_what_there_was(tmp_path: Path) -> None:
    """A server that never ends its answers."""
    found = await bench(FakeServer(step_s=600), tmp_path, *SHORT, "--at-most", "4")
    assert found.code == BROKEN
    assert re.search(
        r"^ended early: after \d+ s of a load of 1 s; [1-7] unfinished requests, ", found.output, re.MULTILINE
    )
    assert "broken" not in found.output


async def test_the_key_is_the_variables_and_is_not_in_the_list_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHUNKSERVE_API_KEY", "sk-of-nobody")
    heads: list[bytes] = []

    class Reading(FakeServer):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            until = reader.readuntil

            async def noted(separator: bytes = b"\n") -> bytes:
                heads.append(found := await until(separator))
                return found

            reader.readuntil = noted  # type: ignore[method-assign]
            await super().serve(reader, writer)

    found = await bench(Reading(), tmp_path, *SHORT)
    assert found.code == PASSED, found.output
    assert len(heads) > 7
    assert all(b"authorization: bearer sk-of-nobody" in head.lower() for head in heads)
    assert "sk-of-nobody" not in (tmp_path / "report.json").read_text() + found.output


async def test_a_documented_command_runs_for_a_shorter_time(tmp_path: Path) -> None:
    (command,) = [
        command
        for one in BLOCKS
        if one.kind == "bash"
        for command in one.commands
        if command.startswith(".venv/bin/chunkserve bench ")
    ]
    _, _, _, *words = shlex.split(command)
    found = await bench(FakeServer(), tmp_path, *words, *LENIENT, "--seconds", "2", "--rate", "4", "--seed", "1")
    assert found.code == PASSED, found.output


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_server_that_does_not_answer_is_one_line() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = chunkserve("bench", url, "--scenario", "smoke")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line == f"chunkserve bench: no server answers at {url}: [Errno 111] Connection refused"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--rate", "-1"], "smoke: --rate is a positive number, not -1"),
        (["--workers", "0"], "smoke: --workers is a positive number, not 0"),
        (["--at-most", "nan"], "smoke: --at-most is a positive number, not nan"),
        (["--scenario", "trace", "--trace", "nowhere.csv"], "nowhere.csv"),
        (["--scenario", "sweep", "--rate", "3"], "--rate: sweep has no use for it"),
        (["--scenario", "cancle"], "argument --scenario: invalid choice: 'cancle'"),
        (["--json", "/no/such/folder/x.json"], "argument --json: expected a file that can be written"),
        (["localhost:8000"], "expected http:// or https:// at the beginning, not 'localhost:8000'"),
    ],
)
def test_options_that_make_no_load_are_refused_in_one_line(arguments: list[str], reason: str) -> None:
    url = [] if arguments[0] == "localhost:8000" else ["http://127.0.0.1:9"]
    assert reason in refusal("bench", *url, *arguments)


def test_without_the_load_generator_one_line_says_what_to_install(tmp_path: Path) -> None:
    """`-S` would also hide what the command itself needs, so that only Locust is hidden."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'locust' else find(name, *more)\n"
    )
    path = f"{tmp_path}:{ROOT}"
    done = chunkserve("bench", "http://127.0.0.1:9", env={"PYTHONPATH": path})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == ("chunkserve bench: the load generator is not installed: pip install 'chunkserve[load]'\n")


def test_the_help_describes_each_scenario() -> None:
    told = " ".join(chunkserve("bench", "--help").stdout.split())
    assert all(f"{name}: {load.about}" in told for name, load in WORKLOADS.items())


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert aligned([["", "sent"], ["a long name", "5"]]) == ["             sent", "a long name     5"]
