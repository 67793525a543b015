"""Owns the contract of followers' processes: a lost one is known and named, and none outlives its leader.
Never needs a real process where a thread will do; the slow tests have real ones."""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.build.engine import build_engine
from engine.build.executor import create_executor
from engine.build.gpu_ranks import visible_gpus
from engine.config import ConfigError, EngineConfig
from engine.parallel.model_digest import model_digest
from engine.parallel.processes import Child, Followers, SubprocessLauncher
from engine.protocol import EngineError, ErrorCode
from engine.step import ExecutorFatalError, StepPlan
from loadtest.server import ROOT
from tests.support.plans import chunk
from tests.support.thread_launcher import RankThread, ThreadLauncher
from tests.support.tiny_models import save_model, save_tokenizer

WAIT_S = 60.0
SETTINGS = {"dtype": "float32", "num_kv_blocks": 12, "num_threads": 1, "tensor_parallel_size": 2}


class Scripted:
    """A RankProcess that ends when the test says so."""

    def __init__(self) -> None:
        self.how: str | None = None
        self.kills = 0

    def poll(self) -> str | None:
        return self.how

    def kill(self) -> None:
        self.kills += 1
        self.how = self.how or "was killed"


def test_a_rank_on_this_machine_sees_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def start(command: object, *, stdin: int, env: dict[str, str]) -> SimpleNamespace:
        seen.append(env.get("CUDA_VISIBLE_DEVICES"))
        return SimpleNamespace(pid=1, stdin=io.BytesIO())

    monkeypatch.setattr("engine.parallel.processes.subprocess.Popen", start)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5,GPU-7,GPU-9")
    SubprocessLauncher(visible_gpus(3)).start(2, b"specification")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    SubprocessLauncher(visible_gpus(3)).start(1, b"specification")
    SubprocessLauncher().start(1, b"specification")
    assert seen == ["GPU-9", "1", None]


def test_the_first_process_that_ends_is_told_with_its_rank() -> None:
    told, known = list[tuple[int, str]](), threading.Event()

    def on_loss(rank: int, how: str) -> None:
        told.append((rank, how))
        known.set()

    processes = [Scripted(), Scripted()]
    followers = Followers(processes, on_loss)
    processes[1].how = "rank 2 is gone"
    assert known.wait(WAIT_S)
    followers.end(0.0)
    followers.tell(on_loss)
    assert told == [(2, "rank 2 is gone")] * 2, "whoever comes later is told, too"
    assert [process.kills for process in processes] == [1, 1]


def test_an_end_that_is_expected_is_no_loss() -> None:
    told: list[int] = []
    process = Scripted()
    followers = Followers([process], lambda rank, how: told.append(rank))
    followers.expect_end()
    process.how = "ended with status 0"
    followers.end(WAIT_S)
    assert told == []


def test_a_digest_says_which_weights_a_directory_has_and_not_where_it_lies(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_model("llama", tmp_path / name)
    one, two = tmp_path / "one", tmp_path / "two"
    assert model_digest(one) == model_digest(two)
    weights = two / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 2000] = bytes(2000)
    weights.write_bytes(content)
    assert model_digest(one) != model_digest(two)


def test_a_rank_with_other_weights_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("llama", tmp_path)
    monkeypatch.setattr("engine.build.ranks.what_computes", lambda *_: "another version")
    launcher = ThreadLauncher()
    with pytest.raises(ConfigError, match=r"not every rank could start: .*the leader has another version"):
        create_executor(tmp_path, EngineConfig(**SETTINGS), launcher=launcher)
    assert all(rank.poll() is not None for rank in launcher.ranks)


def test_a_rank_that_cannot_load_ends_the_start_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room for these weights")

    save_model("llama", tmp_path)
    monkeypatch.setattr("engine.build.follower.cpu_builder", fail)
    with pytest.raises(ConfigError, match=r"rank 1 ended with MemoryError.*no room for these weights"):
        create_executor(tmp_path, EngineConfig(**SETTINGS), launcher=ThreadLauncher())


def test_memory_without_room_for_the_group_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("llama", tmp_path)
    missing = tmp_path / "shm"
    missing.mkdir()
    monkeypatch.setattr("engine.build.ranks.new_directory", lambda: missing / "gone")
    process = Scripted()
    launcher = SimpleNamespace(
        remote_host=None,
        ranks_beside=lambda rank, size: range(size),
        start=lambda rank, specification: process,
    )
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2, and not every rank could start: .*No such file"):
        create_executor(tmp_path, EngineConfig(**SETTINGS), launcher=launcher)
    assert process.kills


def test_the_port_that_ranks_are_told_is_held_before_they_start(tmp_path: Path) -> None:
    """Regression: another process could take it while weights were loaded."""
    save_model("llama", tmp_path)
    refused: list[str] = []

    class Rival(ThreadLauncher):
        def start(self, rank: int, specification: bytes) -> RankThread:
            port = int(str(pickle.loads(specification).place).rpartition(":")[2])
            with pytest.raises(OSError, match="Address already in use") as error:
                socket.create_server(("", port)).close()
            refused.append(str(error.value))
            return super().start(rank, specification)

    executor, _ = create_executor(tmp_path, EngineConfig(**SETTINGS), launcher=Rival("127.0.0.1"))
    executor.shutdown()
    assert refused


def test_a_host_on_which_nobody_can_listen_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(host: str, port: int) -> None:
        raise OSError(f"{host}:{port} cannot be listened on")

    save_model("llama", tmp_path)
    monkeypatch.setattr("kernels.collectives.gloo._listen", refuse)
    launcher = ThreadLauncher("2001:db8::1")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2, and not every rank could start: 2001:db8::1:0"):
        create_executor(tmp_path, EngineConfig(**SETTINGS), launcher=launcher)
    assert launcher.ranks == []


def test_more_ranks_than_heads_are_refused_before_any_rank_starts(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    launcher = ThreadLauncher()
    with pytest.raises(ConfigError, match="tensor_parallel_size is 7, but LlamaForCausalLM has 6 attention heads"):
        create_executor(tmp_path, EngineConfig(**SETTINGS | {"tensor_parallel_size": 7}), launcher=launcher)
    assert launcher.ranks == []


class Recording(SubprocessLauncher):
    def __init__(self) -> None:
        super().__init__()
        self.pids: list[int] = []

    def start(self, rank: int, specification: bytes) -> Child:
        child = super().start(rank, specification)
        self.pids.append(child.pid)
        return child


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_killed_follower_ends_the_engine_with_its_name(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    launcher = Recording()
    executor = create_executor(tmp_path, EngineConfig(**SETTINGS), launcher=launcher)[0]
    prompt = chunk("a", list(range(20)), 0, 20, (1, 2))
    executor.launch(StepPlan(0, (prompt,)))
    ranks = executor.capabilities.ranks
    assert ranks is not None
    assert ranks.why_lost() is None
    os.kill(launcher.pids[0], signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while ranks.why_lost() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ranks.why_lost() == "the process of rank 1 ended by signal 9"
    with pytest.raises(ExecutorFatalError, match="Rank 1 has died"):
        executor.launch(StepPlan(1, (prompt,)))
    executor.shutdown()


LEADER = """
import sys
from tests.engine.parallel.test_processes import *
launcher = Recording()
executor = create_executor(Path(sys.argv[1]), EngineConfig(**SETTINGS), launcher=launcher)[0]
print(launcher.pids[0], flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_follower_ends_with_a_leader_that_is_killed(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    command = [sys.executable, "-c", LEADER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as leader:
        assert leader.stdout is not None
        follower = int(leader.stdout.readline())
        assert is_alive(follower)
        leader.kill()
    deadline = time.monotonic() + WAIT_S
    while is_alive(follower) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(follower)


@pytest.mark.slow
@pytest.mark.anyio
async def test_an_idle_engine_whose_follower_has_died_is_unhealthy(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    save_tokenizer(tmp_path)
    engine = build_engine(str(tmp_path), EngineConfig(**SETTINGS))
    try:
        await engine.check_health()
        (follower,) = [pid for pid in map(int, _children(os.getpid())) if b"engine.build.follower" in _command(pid)]
        os.kill(follower, signal.SIGKILL)
        ranks = engine._core.ranks
        assert ranks is not None
        deadline = time.monotonic() + WAIT_S
        while ranks.why_lost() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        with pytest.raises(EngineError, match="rank 1 ended by signal 9") as error:
            await engine.check_health()
        assert error.value.code is ErrorCode.ENGINE_DEAD
    finally:
        engine.shutdown()


def _children(pid: int) -> list[str]:
    return [word for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()]


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
