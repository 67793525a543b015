"""The command from end to end: Locust, its workers, the report and the exit code, against a scripted server.
Tests marked slow cover a property that tests of the driver, the report or the trace cover alone, too,
or they wait ten seconds."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from loadtest.load import USAGE, command_of, parser, without
from loadtest.load import run as run_load
from loadtest.plan import Closed
from loadtest.server import ROOT, Server, free_port
from loadtest.slo import BROKEN, MISSED, PASSED, SATURATED
from loadtest.workloads import Settings, plan_of
from tests.loadtest.fake_openai import FakeServer, listening
from tests.loadtest.loads import LENIENT, LONGEST_S, load, run, started

pytestmark = [pytest.mark.anyio, pytest.mark.server]

SHORT = ("--seconds", "1", "--rate", "8")
"""A smoke load of seven requests."""
MOONCAKE = Path(__file__).parent / "traces" / "mooncake_sample.jsonl"


async def test_a_load_ends_with_a_report_of_all_its_requests(tmp_path: Path) -> None:
    server = FakeServer(step_s=0.02)
    found = await load(server, tmp_path, *SHORT)
    assert found.code == PASSED, found.output
    (point,) = found.document["points"]
    figures = point["figures"]
    assert figures["offered"] == figures["ok"] == figures["good"] == len(server.bodies) == 7
    assert {body["model"] for body in server.bodies} == {"fake"}, "the server's first model is asked"
    assert figures["output_tokens"] == 7 * 16
    assert figures["prompt_length_ratio"] == 1.0
    # Block by block, as Locust's `iter_lines` reads, half of the gaps are 0 and the first text comes with the last.
    assert figures["itl_p50_ms"] > 1
    assert 20 <= figures["ttft_p50_ms"] < figures["e2e_p50_ms"]
    assert found.output.rstrip().endswith("report.html")
    assert "passed" in found.output
    assert "in flight" in found.output
    assert "Latency over time" in found.page


async def test_workers_share_one_schedule_and_their_figures_add_up(tmp_path: Path) -> None:
    server = FakeServer(step_s=0.002)
    found = await load(server, tmp_path, *SHORT, "--workers", "2", "--seed", "3")
    assert found.code == PASSED, found.output
    assert found.document["generator"]["workers"] == 2
    assert found.document["points"][0]["figures"]["ok"] == len(server.bodies) == 7
    (source,) = plan_of("smoke", Settings(seconds=1.0, rate=8.0)).points[0].sources
    assert not isinstance(source, Closed)
    assert sorted(body["prompt"] for body in server.bodies) == sorted(
        one.body["prompt"] for _, one in source.due("3 0", 0, 1)
    )


async def test_workers_begin_each_point_together(tmp_path: Path) -> None:
    """Requests that one worker still had in hand would add to the load of another worker's next point."""

    class Watching(FakeServer):
        mixed = False

        def __init__(self) -> None:
            super().__init__(step_s=0.02)
            self.shapes: Counter[tuple[int, int]] = Counter()

        async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            shape = len(body["prompt"].split()), body["max_tokens"]
            self.shapes[shape] += 1
            self.mixed |= len(+self.shapes) > 1
            try:
                await super()._answer(body, writer)
            finally:
                self.shapes[shape] -= 1

    server = Watching()
    arguments = ["--scenario", "sweep", "--clients", "3", "--seconds", "0.5", "--lengths", "0.01", "--workers", "2"]
    found = await load(server, tmp_path, *arguments)
    assert found.code == PASSED, found.output
    assert len(server.shapes) == 3
    assert not server.mixed


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["--limits", "ttft_p99_ms<=0.001"], MISSED, "ttft_p99_ms <= 0.001"),
        (["--max-lag-ms", "0"], SATURATED, "the generator sent late"),
        *(  # these lead to the same codes in the same way
            pytest.param(*found, marks=pytest.mark.slow)
            for found in (
                (["--goal", "ttft:0.001", "--limits", "good_share>=0.5"], MISSED, "good_share >= 0.5: 0"),
                (["--max-cpu", "0"], SATURATED, "use more workers"),
                (["--do", "exit 7"], BROKEN, "--do ended with 7"),
                (["--do", "sleep 30"], BROKEN, "--do has not ended with the load"),
            )
        ),
    ],
)
async def test_what_is_wrong_with_a_run_is_its_exit_code(
    tmp_path: Path, arguments: list[str], code: int, reason: str
) -> None:
    found = await load(FakeServer(), tmp_path, *SHORT, *arguments)
    assert (found.code, found.document["exit_code"]) == (code, code), found.output
    assert reason in found.output


@pytest.mark.slow
async def test_a_server_that_loses_tokens_fails_the_load(tmp_path: Path) -> None:
    found = await load(FakeServer(lose=16), tmp_path, *SHORT)
    assert found.code == MISSED
    assert found.document["errors"] == {"the answer counts no tokens (usage)": 7}


async def test_a_command_is_run_once_during_the_load_and_named_in_the_report(tmp_path: Path) -> None:
    arguments = ["--scenario", "replica-kill", *SHORT, "--do", f"echo once >> {tmp_path / 'done'}", "--do-at", "0.5"]
    found = await load(FakeServer(), tmp_path, *arguments)
    assert found.code == PASSED, found.output
    assert (tmp_path / "done").read_text() == "once\n"
    assert "once >>" in found.document["happened"][0]["command"]


@pytest.mark.slow
async def test_a_load_with_clients_that_leave_waits_until_the_server_has_let_go(tmp_path: Path) -> None:
    server = FakeServer(step_s=0.01)
    found = await load(server, tmp_path, "--scenario", "cancel", *SHORT, "--arrivals", "constant")
    assert found.code == PASSED, found.output
    kinds = found.document["points"][0]["kinds"]
    assert kinds["leaves"]["cancelled"] == kinds["leaves"]["offered"] > 0
    assert kinds["stays"]["ok"] == kinds["stays"]["offered"] > 0
    assert server.in_hand == 0


async def test_a_server_that_does_not_let_go_fails_the_load(tmp_path: Path) -> None:
    class Holding(FakeServer):
        """A server that says with each look that it holds one request more."""

        looks = 0

        def _load(self) -> dict[str, object]:
            self.looks += 1
            engine = {"num_running": self.looks, "num_waiting": 0, "num_held_blocks": 0}
            return {"engines": [engine], "ingress": {"num_live": 0}}

    arguments = ["--scenario", "cancel", *SHORT, "--arrivals", "constant", "--settle", "1"]
    found = await load(Holding(step_s=0.01), tmp_path, *arguments)
    assert found.code == MISSED
    assert "the server still holds" in found.output


@pytest.mark.slow
async def test_a_conversation_brings_what_was_said(tmp_path: Path) -> None:
    server = FakeServer()
    # With this seed the client thinks for 57 ms before its second question.
    arguments = ["--scenario", "sessions", "--clients", "1", "--seconds", "1", "--lengths", "0.1", "--seed", "1"]
    found = await load(server, tmp_path, *arguments)
    assert found.code == PASSED, found.output
    assert len(server.bodies[1]["messages"]) == 3
    assert server.bodies[1]["messages"][1]["content"].startswith("word")


@pytest.mark.slow
async def test_a_trace_is_asked_as_it_is(tmp_path: Path) -> None:
    server = FakeServer()
    arguments = ["--scenario", "trace", "--trace", str(MOONCAKE), "--rate", "25", "--lengths", "0.1"]
    found = await load(server, tmp_path, *arguments)
    assert found.code == PASSED, found.output
    assert len(server.bodies) == 30
    assert found.document["plan"]["ideal_hit_share"] > 0.3
    assert found.document["points"][0]["figures"]["prompt_length_ratio"] == 1.0


async def test_a_worker_on_another_machine_gets_its_load_from_the_master(tmp_path: Path) -> None:
    server = FakeServer()
    port = str(free_port())
    worker = [sys.executable, "-m", "loadtest.load", "--worker-of", f"127.0.0.1:{port}"]
    async with started(worker):
        found = await load(server, tmp_path, *SHORT, "--expect-workers", "1", "--port", port)
    assert found.code == PASSED, found.output
    assert len(server.bodies) == 7


@pytest.mark.slow
async def test_a_worker_that_is_lost_breaks_the_run(tmp_path: Path) -> None:
    server = FakeServer()
    port = str(free_port())
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--worker", "--master-port", port]
    async with started(command) as worker:
        arguments = ["--expect-workers", "1", "--port", port, "--seconds", "60", "--rate", "5"]
        running = asyncio.ensure_future(load(server, tmp_path, *arguments))
        async with asyncio.timeout(LONGEST_S):
            while len(server.bodies) < 3:
                assert not running.done(), running.result()
                await asyncio.sleep(0.1)
        os.kill(worker.pid, signal.SIGKILL)
        found = await running
    assert found.code == BROKEN
    assert "was lost" in found.output


async def test_a_load_that_is_ended_writes_its_report(tmp_path: Path) -> None:
    server = FakeServer(step_s=0.05)  # some answers have ended by then, and some are cut off
    async with listening(server) as port:
        url = ["--url", f"http://127.0.0.1:{port}", "--out", str(tmp_path), "--seed", "1", *LENIENT]
        async with started([sys.executable, "-m", "loadtest.load", *url, "--seconds", "600", "--rate", "5"]) as process:
            async with asyncio.timeout(LONGEST_S):
                while len(server.bodies) < 15:  # workers report what they have once a second
                    assert process.returncode is None
                    await asyncio.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.communicate(), LONGEST_S)
        await asyncio.sleep(0)
    found = json.loads((tmp_path / "report.json").read_text())
    assert (found["exit_code"], found["broken"], found["missed"]) == (BROKEN, [], [])
    assert re.fullmatch(
        r"after \d+ s of a load of 600 s; \d+ unfinished requests, which this cut off, are left out", found["ended"]
    )
    figures = found["points"][0]["figures"]
    assert figures["offered"] == figures["ok"] > 0
    assert (figures["failed"], found["errors"]) == (0, {})


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--rate", "-1"], "--rate is a positive number, not -1"),
        (["--scenario", "sweep", "--clients", "1,x"], "--clients is numbers"),
        (["--scenario", "trace", "--trace", "nowhere.csv"], "nowhere.csv"),
        (["--goal", "ttft"], "milliseconds"),
        (["--url", "localhost:8000"], "--url begins with"),
        (["--do-at", "1"], "--do-at is for --do"),
        (["--do", "true", "--do-at", "99"], "within the load's 10 s"),
        (["--settle", "1"], "--settle is for cancel"),
        (["--keys", "KEY"], "--keys is TENANT=KEY"),
        (["--workers", "0"], "--workers is 1 or more"),
        (["--nonsense"], "--nonsense"),
        (["--scenario", "cancle"], "cancle"),
    ],
)
def test_options_that_make_no_load_are_refused_before_anything_starts(
    tmp_path: Path,
    arguments: list[str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("something was started"))
    with pytest.raises(SystemExit) as refused:
        run_load(["--out", str(tmp_path / "out"), *arguments])
    assert refused.value.code == USAGE == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


async def test_a_search_finds_the_rate_at_which_the_limits_break(tmp_path: Path) -> None:
    """The highest rate that it may try is within the server's capacity, so that no time decides."""
    arguments = ["--seconds", "1", "--lengths", "0.02", "--arrivals", "constant", "--seed", "1"]
    arguments += ["--start", "2", "--most", "4", "--precision", "1"]
    server = FakeServer()
    found = await load(server, tmp_path, *arguments, module="loadtest.find_rate")
    assert found.code == PASSED, found.output
    assert found.document["plan"] == {"rate_per_s": 4.0, "runs": 3}
    assert [point["x"] for point in found.document["points"]] == [2.0, 4.0, 4.0]
    assert "highest rate within the limits: 4 requests/s" in found.output
    assert "Goodput against load" in found.page
    assert len({body["prompt"] for body in server.bodies}) == len(server.bodies), "no prompt is asked twice"


@pytest.mark.slow
async def test_a_search_with_a_saturated_generator_finds_nothing(tmp_path: Path) -> None:
    arguments = ["--seconds", "1", "--lengths", "0.02", "--arrivals", "constant", "--start", "3", "--max-lag-ms", "0"]
    found = await load(FakeServer(), tmp_path, *arguments, module="loadtest.find_rate")
    assert found.code == SATURATED
    assert "no rate was found" in found.output
    assert not (tmp_path / "report.json").exists()


@pytest.mark.slow
async def test_this_projects_server_is_loaded_and_lets_go(default_server: Server, tmp_path: Path) -> None:
    url = ["--url", default_server.url, "--out", str(tmp_path), *LENIENT]
    arguments = ["--scenario", "cancel", "--rate", "2", "--seconds", "4", "--lengths", "0.5", "--seed", "5"]
    found = await run([sys.executable, "-m", "loadtest.load", *url, *arguments], tmp_path)
    assert found.code == PASSED, found.output
    figures = found.document["points"][0]["kinds"]["stays"]
    assert figures["ok"] == figures["offered"] > 0
    assert figures["queue_max_ms"] <= figures["ttft_max_ms"]
    assert figures["prompt_length_ratio"] == pytest.approx(1.0, rel=0.1)  # a word is about a token


# --- the command that it makes of its options -----------------------------------------------------------------------


def test_options_of_the_command_are_not_the_locust_files() -> None:
    arguments = ["--url", "http://x", "--workers", "3", "--rate", "2", "--port=9"]
    command = command_of(parser().parse_args(arguments), arguments)
    assert "--rate" in command
    assert command[command.index("--host") + 1] == "http://x"
    assert not {"--url", "--workers", "--port=9"} & set(command)
    assert command[command.index("--processes") + 1] == "3"


def test_options_are_taken_out_with_their_values() -> None:
    assert without(["--a", "1", "--b=2", "--c", "3"], ["--a", "--b"]) == ["--c", "3"]


def test_gevent_stays_in_processes_of_its_own() -> None:
    """gevent changes the standard library of the process that imports Locust: sockets, threads, subprocesses."""
    look = "import sys, loadtest.load, loadtest.find_rate; print({'gevent', 'locust'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
