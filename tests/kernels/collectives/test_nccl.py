"""The group of GPUs, with gloo in NCCL's place: what it promises of sums, and that waits for a device end with a rank.
Never needs a GPU, and so never shows what NCCL does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from kernels.collectives.group import RankLostError, no_reason
from kernels.collectives.nccl import GLOO, NCCL, Backend, NcclGroup, lacks
from kernels.collectives.watch import Watch
from loadtest.server import free_port
from tests.kernels.collectives import jobs
from tests.kernels.collectives.jobs import on_devices
from tests.support.ranks import LostResult, ranks, run_ranks

SHAPES = [(1,), (17,), (3, 33), (5, 2000), (0, 7)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_get_the_same_bits_of_a_sum(dtype: torch.dtype) -> None:
    address = f"127.0.0.1:{free_port()}"
    found = run_ranks(jobs.Devices(address), 3, jobs.sums, SHAPES, dtype, 7)
    for number, shape in enumerate(SHAPES):
        want = sum(jobs.numbers_of(rank, shape, dtype, 7).double() for rank in range(3))
        scale = sum(jobs.numbers_of(rank, shape, dtype, 7).double().abs() for rank in range(3))
        for rank in range(3):
            assert torch.equal(found[rank][number], found[0][number])
        assert ((found[0][number].double() - want).abs() <= 2 * torch.finfo(dtype).eps * scale).all()


def test_all_ranks_get_the_leader_s_tokens() -> None:
    found = run_ranks(jobs.Devices(f"127.0.0.1:{free_port()}"), 3, jobs.leaders_tokens)
    assert found == [[7, -1, 2**40]] * 3


def test_a_rank_that_does_not_arrive_is_lost_after_the_timeout() -> None:
    with ranks(jobs.Devices(f"127.0.0.1:{free_port()}", 0.7), 3, jobs.sums_until_lost) as started:
        for rank in range(3):
            started.told(rank)
        started.signal(1, signal.SIGSTOP)
        for message in started.results(1):
            assert message == LostResult("Not every rank arrived within 0.7 s.")
        started.signal(1, signal.SIGCONT)
        assert started.told(1) == "Not every rank arrived within 0.7 s."


class Hanging:
    """A process group whose device waits for ever, until it is aborted. An abort lasts for as long as there are graphs,
    as NCCL's does."""

    def __init__(self) -> None:
        self.aborted, self.without_graphs = threading.Event(), threading.Event()

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> None:
        """Queue nothing, as NCCL: the wait is elsewhere."""

    def abort(self) -> None:
        self.aborted.set()
        self.without_graphs.wait()


@pytest.fixture
def hanging() -> Iterator[tuple[list[NcclGroup], list[Hanging]]]:
    made = [Hanging(), Hanging()]
    backend = Backend("a test", lambda store, rank, size, limit_s: made[rank], aborts=True)
    address, found = f"127.0.0.1:{free_port()}", dict[int, NcclGroup]()

    def join(rank: int) -> None:
        found[rank] = on_devices(address, 0.4, rank, 2, backend)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield [found[0], found[1]], made
    for device in made:
        device.without_graphs.set()


def wait_for_the_device(
    leader: NcclGroup, follower: NcclGroup, device: Hanging, error: Exception | None = None
) -> None:
    """Wait until the device is aborted, because the follower gives up. error: what the device raises then."""
    with leader.watched(60):
        follower.give_up("no memory")
        assert device.aborted.wait(30)
        if error is not None:
            raise error


def test_a_wait_for_the_device_ends_when_a_rank_gives_up(hanging: tuple[list[NcclGroup], list[Hanging]]) -> None:
    (leader, follower), (leaders, followers) = hanging
    with pytest.raises(RankLostError, match=r"Rank 1 gave up: no memory."):
        wait_for_the_device(leader, follower, leaders)
    assert followers.aborted.wait(30), "its own device waits, too"
    for group in (leader, follower):
        group.close()


def test_a_wait_for_the_device_ends_after_the_timeout(hanging: tuple[list[NcclGroup], list[Hanging]]) -> None:
    (leader, follower), (leaders, followers) = hanging
    with pytest.raises(RankLostError, match=r"Not every rank arrived within 0.4 s."), leader.watched():
        assert leaders.aborted.wait(30)
    with pytest.raises(RankLostError, match=r"Not every rank arrived within 0.4 s."):
        follower.receive()
    assert followers.aborted.wait(30)
    for group in (leader, follower):
        group.close()


def test_an_error_of_what_was_aborted_is_not_its_cause(hanging: tuple[list[NcclGroup], list[Hanging]]) -> None:
    (leader, follower), (leaders, _) = hanging
    with pytest.raises(RankLostError, match="Rank 1 gave up"):
        wait_for_the_device(leader, follower, leaders, RuntimeError("NCCL communicator was aborted"))
    with pytest.raises(RankLostError, match="Rank 1 gave up"):
        leader.all_reduce(torch.ones(1))
    for group in (leader, follower):
        group.close()


def test_a_watch_tells_of_each_long_wait_once_and_of_no_short_one() -> None:
    late, told = list[float](), threading.Semaphore(0)

    def tell(limit_s: float) -> None:
        late.append(limit_s)
        told.release()

    watch = Watch(tell, 0.01)
    with watch.over(60):
        pass
    for limit_s in (0.02, 0.03):
        with watch.over(limit_s):
            assert told.acquire(timeout=30)
    watch.close()
    assert late == [0.02, 0.03]


def test_nccl_is_what_a_group_has_unless_it_is_told_otherwise() -> None:
    group = NcclGroup("127.0.0.1:1", rank=1, size=2, device=torch.device("cuda", 0))
    assert group._backend.name == "nccl"
    assert GLOO.name == "gloo"


def test_torch_s_own_watch_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads it once it makes a group of NCCL's, which torch for CPUs has not."""
    found = list[str | None]()

    class Made:
        Options = SimpleNamespace

        def __init__(self, *_: object) -> None:
            found.append(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))
            found.append(os.environ.get("TORCH_NCCL_ENABLE_MONITORING"))

    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):
        monkeypatch.setenv(name, "1")  # so that it is as before after the test
    monkeypatch.setattr("kernels.collectives.nccl._dist", SimpleNamespace(ProcessGroupNCCL=Made))
    NCCL.make(None, 0, 2, 1.0)
    assert found == ["0", "0"]


def test_an_old_torch_is_said_to_lack_what_a_group_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lacks() is None
    monkeypatch.setattr("kernels.collectives.nccl._c10d", SimpleNamespace(AllreduceOptions=SimpleNamespace))
    assert "2.8 does" in str(lacks())


# --- devices that are not connected -----------------------------------------------------------------------------------


class Joining:
    """Two ranks of which the leader's device waits for the other for ever, as NCCL does while it connects."""

    def __init__(self, why_not: Callable[[], str | None] = no_reason) -> None:
        self.waits, self.ends = threading.Event(), threading.Event()
        address = f"127.0.0.1:{free_port()}"
        self.groups = [
            NcclGroup(address, rank=rank, size=2, device=torch.device("cpu"), backend=Backend("a test", make, True))
            for rank, make in enumerate((self._wait, self._fail))
        ]
        self.errors = dict[int, Exception]()
        reasons = why_not, no_reason
        self._threads = [
            threading.Thread(target=self._join, args=(rank, reasons[rank]), daemon=True) for rank in (0, 1)
        ]

    def run(self) -> tuple[str, str]:
        """Return how each rank's start ends."""
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank waits for ever"
        return str(self.errors[0]), str(self.errors[1])

    def _join(self, rank: int, why_not: Callable[[], str | None]) -> None:
        try:
            self.groups[rank].join(why_not)
        except RankLostError as error:
            self.errors[rank] = error

    def _wait(self, *_: object) -> None:
        self.waits.set()
        self.ends.wait()

    def _fail(self, *_: object) -> None:
        assert self.waits.wait(30)
        raise ValueError("no card")


def test_a_rank_that_is_lost_while_devices_connect_ends_the_others_wait() -> None:
    joining = Joining()
    assert joining.run() == ("Rank 1 cannot connect its device: no card.",) * 2
    joining.ends.set()


def test_a_process_that_ends_while_devices_connect_ends_the_leader_s_wait() -> None:
    joining = Joining(lambda: "rank 1 was killed" if joining.waits.is_set() else None)
    joining.groups[1]._backend = joining.groups[0]._backend
    assert joining.run()[0] == "rank 1 was killed"
    joining.ends.set()
