"""Owns what ranks do in the tests of their groups: each is one rank's, in a process of its own. Long: all jobs.
Never judges: the tests do, by what ranks return."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.collectives.gloo import GlooGroup
from kernels.collectives.group import LEADER, Group, RankLostError
from kernels.collectives.nccl import GLOO, Backend, NcclGroup
from kernels.collectives.reduction import exchange_of, reduction_of
from kernels.collectives.shared_memory import SharedMemoryGroup
from kernels.cpu.native.program import Program, StepRows, Team, pack, pack_grouped_experts
from kernels.eager.forward import EagerPass
from kernels.eager.ops import REFERENCE
from kernels.forward import Linear, Routing, held_experts
from tests.support.ranks import Tell

SLOT_BYTES = MESSAGE_BYTES = 4096


def joined(directory: Path, *, timeout_s: float = 20, **other: int) -> SharedMemoryGroup:
    """Join a group that forms within `timeout_s`."""
    group, begun = SharedMemoryGroup(directory, timeout_s=timeout_s, **other), time.monotonic()
    group.join(lambda: f"no group within {timeout_s} s" if time.monotonic() - begun > timeout_s else None)
    return group


def in_memory(directory: Path, timeout_s: float, slot_bytes: int, rank: int, size: int) -> SharedMemoryGroup:
    return joined(
        directory, rank=rank, size=size, slot_bytes=slot_bytes, message_bytes=MESSAGE_BYTES, timeout_s=timeout_s
    )


def over_tcp(address: str, timeout_s: float, rank: int, size: int) -> GlooGroup:
    return joined_over_tcp(address, rank=rank, size=size, timeout_s=timeout_s)


def on_devices(address: str, timeout_s: float, rank: int, size: int, backend: Backend = GLOO) -> NcclGroup:
    """The group of GPUs, with gloo in NCCL's place."""
    how: dict[str, Any] = {"device": torch.device("cpu"), "backend": backend, "timeout_s": timeout_s}
    group = NcclGroup(address, rank=rank, size=size, **how)
    group.join()
    return group


@dataclass(frozen=True)
class Devices:
    """Makes each rank's end of such a group."""

    address: str
    timeout_s: float = 30.0

    def __call__(self, rank: int, size: int) -> NcclGroup:
        return on_devices(self.address, self.timeout_s, rank, size)


def leaders_tokens(group: NcclGroup, tell: Tell) -> list[int]:
    tokens = torch.tensor([7, -1, 2**40]) if group.rank == LEADER else torch.zeros(3, dtype=torch.int64)
    group.broadcast(tokens)
    return tokens.tolist()


def joined_over_tcp(address: str, **how: Any) -> GlooGroup:
    group = GlooGroup(address, **how)
    group.join()
    return group


def numbers_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of very different sizes, and rank 2's cancel those of rank 0: so the order of a sum decides its bits."""
    generator = torch.Generator().manual_seed(seed * 100 + rank % 2 + rank // 3 * 3)
    sizes = torch.randint(-20, 20, shape, generator=generator).float()
    return (torch.randn(shape, generator=generator) * sizes.exp2()).to(dtype) * (-1 if rank == 2 else 1)


def sums(group: Group, tell: Tell, shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int) -> list[Tensor]:
    found = []
    for shape in shapes:
        x = numbers_of(group.rank, shape, dtype, seed)
        result = group.all_reduce(x)
        assert result.data_ptr() == x.data_ptr()
        found.append(x)
    return found


def sums_of_one_number(group: Group, tell: Tell, number: float, count: int) -> Tensor:
    return group.all_reduce(torch.full((count,), number, dtype=torch.bfloat16))


def gathers(group: Group, tell: Tell, cases: list[tuple[int, list[int]]], seed: int) -> list[Tensor | None]:
    return [
        group.gather(numbers_of(group.rank, (rows, sizes[group.rank]), torch.float32, seed), sizes)
        for rows, sizes in cases
    ]


def rows_for(rank: int, counts: list[list[int]], width: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return what a rank has for all ranks. counts: [from, to]"""
    return numbers_of(rank, (sum(counts[rank]), width), dtype, seed)


def exchanges(
    group: Any, tell: Tell, cases: list[tuple[list[list[int]], int]], dtype: torch.dtype, seed: int
) -> list[tuple[Tensor, list[int]]]:
    """cases: (counts [from, to], the width)."""
    return [
        group.exchange(rows_for(group.rank, counts, width, dtype, seed), counts[group.rank]) for counts, width in cases
    ]


def exchange_and_sum(group: Any, tell: Tell) -> tuple[list[float], list[float]]:
    """The first rank has no rows at all, and all sum right after."""
    rows = torch.full((group.rank, 2), float(group.rank))
    found, _ = group.exchange(rows, [group.rank, *[0] * (group.size - 1)])
    return found.flatten().tolist(), group.all_reduce(torch.full((2,), float(len(found)))).tolist()


def exchange_different_rows(group: Any, tell: Tell) -> None:
    group.exchange(torch.ones(group.size, 4 + group.rank // 2), [1] * group.size)


def exchange_until_lost(group: Any, tell: Tell) -> None:
    """The rows take several slots, so that ranks are lost within an exchange, too."""
    group.all_reduce(torch.ones(4))
    tell("runs")
    while True:
        group.exchange(torch.ones(3 * group.size, SLOT_BYTES), [3] * group.size)


def exchange_without_memory(group: Any, tell: Tell) -> None:
    """The last rank has no memory for what it gets in the second of three exchanges."""
    rows = torch.ones(group.size, 3)
    group.exchange(rows, [1] * group.size)
    if group.rank == group.size - 1:
        torch.Tensor.new_empty = _no_memory  # type: ignore[method-assign,assignment]  # of this process alone
    for _ in range(2):
        group.exchange(rows, [1] * group.size)


def _no_memory(*_: Any) -> Tensor:
    raise MemoryError("injected")


def exchange_and_leave(group: Any, tell: Tell) -> list[float]:
    """Each rank has rows for the next one alone, and leaves as soon as it has its own."""
    counts = [int(rank == (group.rank + 1) % group.size) for rank in range(group.size)]
    found, _ = group.exchange(torch.full((1, 1), float(group.rank)), counts)
    return found.flatten().tolist()


def messages(group: Group, tell: Tell, sizes: list[int], seed: int) -> list[bytes]:
    source = random.Random(seed)
    sent = [source.randbytes(size) for size in sizes]
    if group.rank != LEADER:
        return [group.receive() for _ in sent]
    for message in sent:
        group.send(message)
    return sent


def send_before_anyone_listens(group: Group, tell: Tell, gate_file: str) -> list[bytes]:
    """The leader opens the gate once it has sent two messages."""
    gate = Path(gate_file)
    if group.rank == LEADER:
        group.send(b"first")
        group.send(b"second")
        gate.touch()
        return []
    while not gate.exists():
        time.sleep(0.001)
    return [group.receive(), group.receive()]


def many_rounds(group: Any, tell: Tell, rounds: int, seed: int) -> int:
    """Sums, columns, rows and messages in a random order, with random delays; return how many were wrong."""
    plan, delays, wrong = random.Random(seed), random.Random(seed + 1 + group.rank), 0
    for number in range(rounds):
        if delays.random() < 0.02:
            time.sleep(delays.random() * 0.004)
        kind, width = plan.random(), plan.randrange(1, 3000)
        if kind < 0.2:
            counts = [(number + to + group.rank) % 3 for to in range(group.size)]
            rows, received = group.exchange(torch.full((sum(counts), width), float(number)), counts)
            wrong += received != [(number + group.rank + rank) % 3 for rank in range(group.size)]
            wrong += not bool((rows == number).all())
            continue
        if kind < 0.7:
            found: Tensor | None = group.all_reduce(torch.full((width,), float(group.rank + number)))
            wanted = sum(rank + number for rank in range(group.size))
        elif kind < 0.85:
            found = group.gather(torch.full((2, 5), float(number)), [5] * group.size)
            wanted = number
        else:
            if group.rank == LEADER:
                group.send(number.to_bytes(4, "big") * width)
                continue
            message = group.receive()
            wrong += message != number.to_bytes(4, "big") * width
            continue
        wrong += found is not None and not bool((found == wanted).all())
    return wrong


def sums_until_lost(group: Group, tell: Tell) -> None:
    group.all_reduce(torch.ones(4))
    tell("runs")
    while True:
        group.all_reduce(torch.ones(2000))


def listen_until_lost(group: Group, tell: Tell) -> None:
    """The leader is silent: it waits for a gathering that nobody else comes to."""
    group.all_reduce(torch.ones(4))
    tell("runs")
    if group.rank == LEADER:
        signal.pause()
    group.receive()


def check_until_lost(group: Group, tell: Tell) -> None:
    group.all_reduce(torch.ones(4))
    tell("runs")
    if group.rank != LEADER:
        signal.pause()
    while True:
        group.check()
        time.sleep(0.001)


def send_until_lost(group: Group, tell: Tell) -> None:
    """Followers take one message, and then none."""
    if group.rank != LEADER:
        group.receive()
        tell("runs")
        signal.pause()
    tell("runs")
    while True:
        group.send(b"message")


def give_up_alone(group: Group, tell: Tell, who: int) -> str:
    """Return what the rank's next call says, too."""
    group.all_reduce(torch.ones(4))
    if group.rank == who:
        group.give_up("no memory")
    try:
        group.all_reduce(torch.ones(4))
    except RankLostError as error:
        return str(error)
    return "summed"


def sum_different_things(group: Group, tell: Tell) -> None:
    group.all_reduce(torch.ones(4 + group.rank // 2))


def leave_after_the_last_message(group: Group, tell: Tell) -> bytes:
    """The leader is gone before the others look."""
    if group.rank == LEADER:
        group.send(b"stop")
        return b""
    if group.rank == 1:
        return group.receive()
    time.sleep(0.3)
    return group.receive()


def be_late(group: Any, tell: Tell, who: int) -> list[float]:
    group.all_reduce(torch.ones(4))
    if group.rank == who:
        time.sleep(0.3)
    group.all_reduce(torch.ones(4))
    late: list[float] = group.late_s
    group.all_reduce(torch.ones(4))  # nobody changes what others may still read
    return late


class _Alone:
    """A process that makes its groups itself."""

    def close(self) -> None: ...


def alone(rank: int, size: int) -> Any:
    return _Alone()


def outlive_a_zombie(nobody: object, tell: Tell, directory: Path) -> tuple[str, str]:
    """Return what a sum says once the other rank, a child that is not reaped, was killed; and the child's state."""
    child = os.fork()
    if child == 0:
        group = in_memory(directory, 30, SLOT_BYTES, 1, 2)
        group.all_reduce(torch.ones(4))
        signal.pause()
    group = in_memory(directory, 30, SLOT_BYTES, LEADER, 2)
    group.all_reduce(torch.ones(4))
    os.kill(child, signal.SIGKILL)
    try:
        group.all_reduce(torch.ones(4))
    except RankLostError as error:
        state = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0]
        os.waitpid(child, 0)
        return str(error), state
    return "summed", ""


# --- passes over a step -----------------------------------------------------------------------------------------------


class Foreign:
    """A group that the native library does not know."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(x)

    def exchange(self, rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        return self._group.exchange(rows, counts)

    def give_up(self, reason: str) -> None:
        self._group.give_up(reason)


def _program(group: Any, foreign: bool, threads: int, capacity: int, dtype: torch.dtype) -> Program:
    reduction = reduction_of(Foreign(group) if foreign else group)  # type: ignore[arg-type]
    return Program(Team(threads), block_size=16, capacity=capacity, dtype=dtype, reduction=reduction)


def _rows(count: int) -> StepRows:
    return StepRows([list(range(count))], [0], [count], [list(range(count // 16 + 1))])


def native_sums(
    group: Group, tell: Tell, foreign: bool, threads: int, counts: list[int], shape: tuple[int, int], dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Sum the rank's embeddings over the ranks, and that sum once more; return both for each number of tokens."""
    program = _program(group, foreign, threads, shape[0], dtype)
    table = numbers_of(group.rank, shape, dtype, 0)
    once, twice = program.all_reduce(program.embed(table)), program.embed(table)
    program.all_reduce(program.all_reduce(twice))
    found = []
    for count in counts:
        program.run(_rows(count))
        found.append((once.tensor[:count].clone(), twice.tensor[:count].clone()))
    return found


def shards_of_a_layer(group: Group, tell: Tell, dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor]:
    """Compute a step of `layer` by the native library and by eager operations, with this rank's part of its weights."""
    table, up, down = layer_weights(dtype)
    size = len(up) // 2 // group.size
    first, last = group.rank * size, (group.rank + 1) * size
    own = torch.cat((up[first:last], up[len(up) // 2 :][first:last])), down[:, first:last].contiguous()
    program = _program(group, False, 2, count, dtype)
    packed = pack(Linear(own[0].clone()), gated=True), pack(Linear(own[1].clone()))
    native = layer(program, table, *packed)
    program.run(_rows(count))
    ids = torch.arange(count)
    eager = EagerPass(REFERENCE, token_ids=ids, positions=ids, slots=ids, plan=None, group=group)
    return native.tensor[:count].clone(), layer(eager, table, *map(Linear, own))


ROUTING = Routing(3, renormalize=True)


def mixture_weights(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return embeddings, a router and the experts' gate_up and down: an odd number of experts, and rows of no whole
    words."""
    generator = torch.Generator().manual_seed(6)
    table, router = torch.randn(64, 34, generator=generator), torch.randn(7, 34, generator=generator) / 2
    gate_up, down = torch.randn(7, 76, 34, generator=generator) / 6, torch.randn(7, 34, 38, generator=generator) / 6
    return table.to(dtype), router, gate_up.to(dtype), down.to(dtype)


def record_mixture(program: Program, dtype: torch.dtype, held: range, how: str = "plain") -> Any:
    """Record two mixtures, one after the other. how: `grouped`: experts in 4 bits with minima; `rounded`: their
    activations in 8 bits, too."""
    table, router, *weights = mixture_weights(dtype)
    if how == "plain":
        gate_up, down = (Linear(weight[held.start : held.stop].clone()) for weight in weights)
        packed = pack(gate_up, gated=True), pack(down)
    else:
        from tests.kernels.cpu.native.test_grouped import draw  # not needed by ranks that only sum

        generator, rounded = torch.Generator().manual_seed(8), how == "rounded"
        table, router = torch.cat((table, table), 1)[:, :64].contiguous(), torch.cat((router, router), 1)[:, :64]
        router = router.contiguous()
        first, second = ([draw("Q4_1", *shape, generator) for _ in range(7)] for shape in ((192, 64), (64, 96)))
        own = slice(held.start, held.stop)
        packed = (
            pack_grouped_experts(first[own], gated=True, rounded=rounded),
            pack_grouped_experts(second[own], rounded=rounded),
        )
    return program.experts(program.experts(program.embed(table), router, *packed, ROUTING), router, *packed, ROUTING)


def divided_experts(
    group: Any, tell: Tell, foreign: bool, threads: int, steps: list[list[int]], dtype: torch.dtype, how: str = "plain"
) -> list[Tensor]:
    """Return what this rank's tokens get in each step. steps: how many tokens each rank has. how: as record_mixture."""
    exchange = exchange_of(Foreign(group) if foreign else group)
    program = Program(Team(threads), block_size=16, capacity=64, dtype=dtype, exchange=exchange)
    out, found = record_mixture(program, dtype, held_experts(7, group.rank, group.size), how), []
    for counts in steps:
        out.tensor.fill_(torch.nan)
        program.run(_rows(counts[group.rank]) if counts[group.rank] else StepRows((), (), (), ()))
        found.append(out.tensor[: counts[group.rank]].clone())
    return found


def experts_until_lost(group: Any, tell: Tell) -> None:
    program = Program(Team(2), block_size=16, capacity=64, dtype=torch.float32, exchange=exchange_of(group))
    record_mixture(program, torch.float32, held_experts(7, group.rank, group.size))
    program.run(_rows(64))
    tell("runs")
    while True:
        program.run(_rows(64))


def more_rows_than_there_is_room(group: Any, tell: Tell, foreign: bool) -> str:
    """The last rank has room for a token of each rank."""
    exchange = exchange_of(Foreign(group) if foreign else group)
    capacity = 1 if group.rank else 64
    program = Program(Team(1), block_size=16, capacity=capacity, dtype=torch.float32, exchange=exchange)
    record_mixture(program, torch.float32, held_experts(7, group.rank, group.size))
    try:
        program.run(StepRows((), (), (), ()) if group.rank else _rows(64))
    except RankLostError as error:
        return str(error)
    return "computed"


def layer_weights(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((64, 32), (2 * 48, 32), (32, 48))
    table, up, down = (torch.randn(shape, generator=generator) / shape[1] ** 0.5 for shape in shapes)
    return table.to(dtype), up.to(dtype), down.to(dtype)


def layer(run: Any, table: Tensor, up: Linear, down: Linear, ranks: bool = True) -> Any:
    x = run.linear(run.gated_linear(run.embed(table), up), down)
    return run.all_reduce(x) if ranks else x


def run_until_lost(group: Any, tell: Tell, foreign: bool, threads: int, count: int) -> tuple[str, bool, str]:
    """Return what a run says, whether anything was computed after the sum that failed, and what the next run says."""
    program = _program(group, foreign, threads, count, torch.float32)
    table = torch.ones(count, 512)
    before = program.all_reduce(program.all_reduce(program.embed(table)))
    after = program.embed(table)
    assert after.address != before.address
    program.run(_rows(count))
    tell("runs")
    said, went_on = [], False
    for _ in range(2):
        try:
            while True:
                after.tensor.fill_(torch.nan)
                program.run(_rows(count))
        except RankLostError as error:
            said.append(str(error))
            went_on |= not bool(after.tensor.isnan().all())
    del program
    return said[0], went_on, said[1]
