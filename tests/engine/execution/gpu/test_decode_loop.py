"""Owns that decode steps which go on from the step before copy nothing to the device, and give the tokens of any other.
Never needs a GPU: captures are made on the CPU, where a replay does the captured work again on the same tensors."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch.sampler import sample
from engine.build.gpu import start_on_device
from engine.config import EngineConfig
from engine.execution.answers import LOST_TOKEN
from engine.execution.gpu.executor import DeviceExecutor
from engine.step import PENDING_TOKEN, GraphUse, LogitControls, RowSampling, ScheduledRequest, StepPlan
from kernels.eager.ops import Ops
from tests.support.fake_device import FakeDevice, write_model
from tests.support.fake_flash import FakeFlash
from tests.support.plans import chunk, decode, greedy

TOKENS = torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(5)).tolist()
LENGTHS = (3, 16, 17)
"""The prompts' lengths: the first decode rows are within a block and at both sides of its edge."""
TABLES = tuple(tuple(range(number, 30, 6)) for number in range(6))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_flash_attn", FakeFlash(any_dtype=True))  # type: ignore[arg-type]
    monkeypatch.setattr("kernels.flash.packages.DTYPES", (torch.float32,))


def make(model: Path, **options: Any) -> DeviceExecutor:
    engine = {"load_format": "dummy", "dtype": "float32", "num_kv_blocks": 30, "num_threads": 1}
    config = EngineConfig(**engine | {"max_num_seqs": 6, "max_num_batched_tokens": 96} | options)
    return start_on_device(model, config, FakeDevice(), "a test").build()[0]


@pytest.fixture
def captured(model: Path) -> Iterator[DeviceExecutor]:
    executor = make(model)
    with torch.inference_mode():
        executor.model._tables.fill_(29)
        executor.model._hidden.fill_(torch.nan)
        executor.model._packed.fill_(7)
    yield executor
    executor.shutdown()


class Texts:
    """Requests that an executor decodes side by side, each token read before the next step or when that is queued."""

    def __init__(self, executor: DeviceExecutor, *, overlap: bool, sampling: RowSampling | None = None) -> None:
        self.executor, self.overlap, self.sampling = executor, overlap, sampling or greedy()
        self.device: Any = executor._device
        self.tokens: dict[int, list[int]] = {}
        self.uses: list[GraphUse | None] = []
        self.uploads: list[int] = []
        """How many copies to the device each step had."""
        self._flying: list[list[int]] = []
        self._steps = 0

    def prompt(self, number: int, length: int) -> None:
        tokens = self.tokens[number] = TOKENS[number : number + length]
        row = chunk(f"r{number}", tokens, 0, length, TABLES[number])._replace(sampling=self.sampling)
        self._queue([number], [row])

    def step(self, *numbers: int, sampling: RowSampling | None = None) -> None:
        self._queue(list(numbers), [self._row(number, sampling or self.sampling) for number in numbers])

    def read(self) -> None:
        numbers, output = self._flying.pop(0), self.executor.collect()
        self.uses.append(output.graph)
        for number, tokens in zip(numbers, output.sampled, strict=True):
            self.tokens[number] += tokens

    def _row(self, number: int, sampling: RowSampling) -> ScheduledRequest:
        pending = sum(number in numbers for numbers in self._flying)
        assert pending <= 1
        end = len(self.tokens[number]) + pending
        token = PENDING_TOKEN if pending else self.tokens[number][-1]
        blocks = TABLES[number][: -(-end // 16)]  # as many as the row needs
        return decode(f"r{number}", token, end - 1, blocks)._replace(sampling=sampling)

    def _queue(self, numbers: list[int], rows: list[ScheduledRequest]) -> None:
        before = self.device.asked.count("upload")
        self.executor.launch(StepPlan(self._steps, tuple(rows)))
        self.uploads.append(self.device.asked.count("upload") - before)
        self._steps += 1
        self._flying.append(numbers)
        while len(self._flying) > self.overlap:
            self.read()


def decoded(texts: Texts, count: int) -> dict[int, list[int]]:
    """Return the texts of LENGTHS after `count` decode steps of all."""
    for number, length in enumerate(LENGTHS):
        texts.prompt(number, length)
    for _ in range(count):
        texts.step(0, 1, 2)
    while texts._flying:
        texts.read()
    return texts.tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_a_steady_decode_step_uploads_nothing_but_new_blocks(
    model: Path, captured: DeviceExecutor, overlap: bool
) -> None:
    """Regression guard: each step copied all positions, lengths, slots, block tables and parameters."""
    texts = Texts(captured, overlap=overlap)
    captured._device.uploaded.clear()  # type: ignore[attr-defined]
    found = decoded(texts, 33)
    assert found == decoded(Texts(make(model, cuda_graphs="none"), overlap=overlap), 33)
    assert texts.uses[-33:] == [GraphUse(True, "decode 4")] * 33
    steady = texts.uploads[len(LENGTHS) + 1 :]
    ends = [[length + step + 1 for length in LENGTHS] for step in range(1, 33)]
    assert steady == [int(any(end % 16 == 1 for end in each)) for each in ends], "one copy where a row has a new block"
    assert 3 < sum(steady) < 9
    assert captured._device.uploaded[-1] == 2, "a place and a block"  # type: ignore[attr-defined]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_batches_that_change_at_any_moment_give_the_tokens_of_plain_steps(
    model: Path, captured: DeviceExecutor, seed: int, overlap: bool
) -> None:
    """Rows come, go, change places, miss steps, and sometimes have logits that are changed or reported."""
    draw = random.Random(seed)
    special = [
        replace(greedy(), controls=LogitControls(logit_bias=((65, 50.0),))),
        greedy(num_logprobs=1),
        replace(greedy(), banned_token_ids=(1, 2, 3)),
        replace(greedy(), temperature=0.8, top_k=9, seed=4),
    ]
    both = [Texts(executor, overlap=overlap) for executor in (captured, make(model, cuda_graphs="none"))]
    steps: list[tuple[int, tuple[int, ...], RowSampling | None]] = []
    live: list[int] = []
    for _ in range(14):
        if len(live) < 6 and draw.random() < 0.7:
            live.append(min(set(range(6)) - set(live)))
            steps.append((draw.choice([2, 15, 16, 17]), (live[-1],), None))
        elif draw.random() < 0.3:
            live.pop(draw.randrange(len(live)))
        if draw.random() < 0.3:
            draw.shuffle(live)
        some = tuple(live) if draw.random() < 0.7 else tuple(live[1:])
        sampling = draw.choice(special) if draw.random() < 0.3 else None
        steps += [(0, some, sampling)] * (draw.randrange(4) if some else 0)
    for texts in both:
        for length, numbers, sampling in steps:
            if length:
                while texts._flying:
                    texts.read()
                texts.executor.forget([f"r{numbers[0]}"])
                texts.prompt(numbers[0], length)
            else:
                if overlap and any(n not in texts._flying[0] for n in numbers if texts._flying):
                    texts.read()  # as the core does: a row that missed a step has no token in flight
                texts.step(*numbers, sampling=sampling)
        while texts._flying:
            texts.read()
    assert both[0].tokens == both[1].tokens
    assert 0 in both[0].uploads, "some steps went on from the one before"


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_of_one_length_that_change_places_go_on_from_their_own_tokens(
    model: Path, captured: DeviceExecutor, overlap: bool
) -> None:
    found = []
    for executor in (captured, make(model, cuda_graphs="none")):
        texts = Texts(executor, overlap=overlap)
        for number in (0, 1):
            texts.prompt(number, 5)
        for order in ((0, 1), (0, 1), (1, 0), (1, 0), (0, 1)):
            texts.step(*order)
        while texts._flying:
            texts.read()
        found.append(texts.tokens)
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_a_row_whose_logits_are_not_finite_fails_alone_and_so_does_the_step_behind_it(captured: DeviceExecutor) -> None:
    texts = Texts(captured, overlap=True)
    for number, length in enumerate(LENGTHS):
        texts.prompt(number, length)
    texts.step(0, 1, 2)
    texts.step(0, 1, 2)
    with torch.inference_mode():
        for tensors in captured.model.cache.layers:
            for tensor in tensors:
                tensor[list(TABLES[1])] = torch.nan
    texts.step(0, 1, 2)
    texts.step(0, 1, 2)
    assert texts.uploads[-2:] == [0, 0]
    outputs = [captured.collect() for _ in texts._flying]
    assert outputs[-1].failed == ((1, LOST_TOKEN),)
    assert [len(tokens) for tokens in outputs[-1].sampled] == [1, 0, 1]


def test_after_a_step_that_failed_to_be_queued_the_next_one_copies_everything(
    model: Path, captured: DeviceExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = Texts(captured, overlap=False)
    for number, length in enumerate(LENGTHS):
        texts.prompt(number, length)
    texts.step(0, 1, 2)

    def fail() -> None:
        raise RuntimeError("a bug")

    loop = captured.model._loop
    assert loop is not None
    with monkeypatch.context() as patch:
        for found in loop._captured.values():
            patch.setattr(found.choose, "work", fail)
        with pytest.raises(RuntimeError, match="a bug"):
            texts.step(0, 1, 2)
    texts.step(0, 1, 2)
    assert texts.uploads[-1] > 1
    assert texts.tokens == decoded(Texts(make(model, cuda_graphs="none"), overlap=False), 2)


def test_padding_never_moves_to_a_block_that_a_row_has(captured: DeviceExecutor) -> None:
    """Three rows run in the size of four: after a block's 16 steps, the fourth would write behind its own."""
    device: Any = captured._device
    texts = Texts(captured, overlap=False)
    decoded(texts, 20)
    assert texts.uploads[-1] == 0
    inputs = captured.model._views(captured.model._captured[captured.model._loop._last.bucket].layout)  # type: ignore[union-attr]
    assert inputs.positions.tolist()[:3] == [length + 19 for length in LENGTHS]
    assert int(inputs.positions[3]) == 0
    assert int(inputs.slots[3]) == captured.model._padding_block * 16
    assert device.asked.count("wait")


class Drawing:
    """Choices as Ops.sample_packed defines them, by the engine's own sampler."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, logits: Tensor, floats: Tensor, integers: Tensor, out: Tensor) -> Tensor:
        rows = [
            RowSampling(temperature, top_k, top_p, min_p, seed)
            for temperature, top_p, min_p, top_k, seed in zip(*floats.tolist(), *integers[:2].tolist(), strict=True)
        ]
        self.rows += len(rows)
        chosen = sample(logits.float(), rows, integers[2].tolist(), [()] * len(rows))
        return out.copy_(torch.tensor([-1 if token is None else token for token in chosen]))


@pytest.mark.parametrize("overlap", [False, True])
def test_drawn_tokens_are_those_of_the_sampler_at_their_positions(
    model: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """Where the kernels draw from numbers on the device, steps with any filter go on, too."""
    drawn = RowSampling(temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, seed=-7)
    want = decoded(Texts(make(model, cuda_graphs="none"), overlap=overlap, sampling=drawn), 20)
    drawing = Drawing()
    init = Ops.__init__

    def with_drawing(self: Ops, *args: Any, **options: Any) -> None:
        init(self, *args, **options | {"sample_packed": drawing})

    monkeypatch.setattr(Ops, "__init__", with_drawing)
    executor = make(model)
    assert executor.model.ops.sample_packed is drawing
    drawing.rows = 0
    texts = Texts(executor, overlap=overlap, sampling=drawn)
    assert decoded(texts, 20) == want
    assert drawing.rows == 4 * 20
    assert texts.uploads[-1] == 0
