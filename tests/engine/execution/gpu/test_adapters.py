"""Owns the contract of LoRA adapters on a device: texts are the CPU's, and slots change while steps are in flight.
Never needs a GPU: Triton's interpreter runs the kernels, and captures are made on the CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.adapter_cache import AdapterCache
from engine.build.executor import create_executor
from engine.build.gpu import start_on_device
from engine.config import EngineConfig, ResolvedConfig
from engine.core.core import EngineCore
from engine.execution.executor import ModelExecutor
from engine.execution.gpu.adapters import AdapterSlots
from engine.execution.gpu.executor import DeviceExecutor
from engine.protocol import AdapterRef, SamplingParams, Submission, Token
from engine.scheduling.request import create_request
from engine.step import GraphUse, ScheduledRequest, StepPlan
from kernels.choice import TRITON_TABLE
from tests.golden.adapters import ADAPTERS, KIND
from tests.support.fake_device import FakeDevice
from tests.support.plans import chunk, decode, run
from tests.support.tiny_adapters import save_adapter
from tests.support.tiny_models import VOCAB, make_model

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

TOKENS = torch.randint(0, VOCAB, (3, 40), generator=torch.Generator().manual_seed(5)).tolist()
TABLES = ((9, 3, 4), (1, 2, 5), (6, 7, 8))
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_kv_blocks": 12, "num_threads": 1, "max_loras": 3, "max_lora_rank": 7, "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
}  # fmt: skip
CLOSE = {"atol": 2e-4, "rtol": 1e-4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of one layer, and adapters beside it: `0` to `3`."""
    made = tmp_path_factory.mktemp("adapted")
    model: Any = make_model(KIND)
    model.config.num_hidden_layers, model.model.layers = 1, model.model.layers[:1]
    model.save_pretrained(made / "model")
    for number, options in enumerate(ADAPTERS):
        save_adapter(model, made / str(number), **options)
    return made


Made = tuple[ModelExecutor, ResolvedConfig]


@pytest.fixture(scope="module")
def cpu(directory: Path) -> Iterator[Made]:
    made = create_executor(directory / "model", EngineConfig(device="cpu", **SETTINGS | {"max_loras": 4}))
    yield made
    made[0].shutdown()


def on_device(directory: Path, **options: Any) -> tuple[DeviceExecutor, ResolvedConfig]:
    sizes: dict[str, Any] = {
        "cuda_graph_decode_rows": (3,), "cuda_graph_mixed_tokens": (24,), "cuda_graph_mixed_rows": (3,),
    }  # fmt: skip
    sizes = {} if options.get("cuda_graphs") == "none" else sizes
    config = EngineConfig(**SETTINGS | {"attention": "triton", "overlap": True} | sizes | options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernels.choice.TRITON_TABLE", TRITON_TABLE)
        return start_on_device(directory / "model", config, FakeDevice(), "a test").build()


@pytest.fixture(scope="module", params=["captured", pytest.param("plain", marks=pytest.mark.slow)])
def gpu(request: pytest.FixtureRequest, directory: Path) -> Iterator[tuple[DeviceExecutor, ResolvedConfig]]:
    made = on_device(directory, **({} if request.param == "captured" else {"cuda_graphs": "none"}))
    yield made
    made[0].shutdown()


def host_of(executor: ModelExecutor) -> Any:
    host = executor.capabilities.adapters
    assert host is not None
    return host


@pytest.fixture
def kept(cpu: Made, gpu: Made, directory: Path) -> Iterator[list[str]]:
    """Keep the first three adapters in both executors; returns their digests."""
    found = []
    for number in range(3):
        for executor, _ in (cpu, gpu):
            digest, weights = host_of(executor).read(str(directory / str(number)))
            host_of(executor).keep(digest, weights)
        found.append(digest)
    yield found
    for executor, _ in (cpu, gpu):
        for digest in found:
            host_of(executor).drop(digest)


def prefix(executor: ModelExecutor, adapters: Sequence[str], counts: Sequence[int]) -> None:
    """Feed the first tokens of each sequence, one after another."""
    for number, (adapter, count) in enumerate(zip(adapters, counts, strict=True)):
        run(executor, chunk(f"{number}", TOKENS[number], 0, count, TABLES[number])._replace(adapter=adapter))


def logits(executor: ModelExecutor, *rows: ScheduledRequest) -> Tensor:
    return executor.logits(StepPlan(0, rows)).clone()


def next_rows(adapters: Sequence[str], counts: Sequence[int], mixed: bool) -> list[ScheduledRequest]:
    """Return a decode row for each sequence; the last is a chunk of six tokens if `mixed`."""
    rows = [decode(f"{n}", TOKENS[n][counts[n]], counts[n], TABLES[n]) for n in range(3)]
    if mixed:
        rows[2] = chunk("2", TOKENS[2], counts[2], counts[2] + 6, TABLES[2])
    return [row._replace(adapter=adapter) for row, adapter in zip(rows, adapters, strict=True)]


# --- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mixed", [pytest.param(False, id="decode"), pytest.param(True, id="mixed", marks=pytest.mark.slow)]
)
def test_rows_of_several_adapters_beside_one_without_are_those_of_the_cpu(
    cpu: Made, gpu: Made, kept: list[str], mixed: bool
) -> None:
    counts = (18, 5, 11)
    for adapters in ((kept[0], "", kept[1]), (kept[2], kept[2], ""), (kept[1], kept[0], kept[2])):
        found = []
        for executor, _ in (cpu, gpu):
            prefix(executor, adapters, counts)
            found.append(logits(executor, *next_rows(adapters, counts, mixed)))
        torch.testing.assert_close(found[1], found[0], **CLOSE)


@pytest.mark.parametrize("mixed", [False, True], ids=["decode", "mixed"])
def test_a_row_without_an_adapter_is_the_same_to_the_bit_as_in_a_step_without_any(
    gpu: Made, kept: list[str], mixed: bool
) -> None:
    counts, none = (7, 16, 9), ("", "", "")
    prefix(gpu[0], none, counts)
    want = logits(gpu[0], *next_rows(none, counts, mixed))
    got = logits(gpu[0], *next_rows((kept[0], "", kept[1]), counts, mixed))
    assert torch.equal(got[1], want[1])
    assert not torch.isclose(got[0], want[0]).all()
    assert not torch.isclose(got[2], want[2]).all()


def test_each_kind_of_step_is_replayed_in_a_capture_of_its_own(directory: Path, gpu: Made, kept: list[str]) -> None:
    executor, captured = gpu[0], bool(gpu[0].model._captured)  # type: ignore[attr-defined]
    for adapters, name in (((kept[0], "", kept[1]), " with adapters"), (("", "", ""), ""), (kept, " with adapters")):
        for mixed, size in ((False, "decode 3"), (True, "mixed 24x3")):
            executor.launch(StepPlan(0, tuple(next_rows(adapters, (4, 4, 4), mixed))))
            assert executor.collect().graph == (GraphUse(True, size + name) if captured else None)


# --- texts -----------------------------------------------------------------------------------------------------------


def texts(made: Made, adapters: Sequence[AdapterRef | None], **overrides: Any) -> list[list[int]]:
    """Serve a prompt with each adapter at once; returns the answers."""
    core = EngineCore(made[0], replace(made[1], **overrides))
    found: list[list[int]] = [[] for _ in adapters]
    for number, adapter in enumerate(adapters):
        submission = Submission(str(number), tuple(TOKENS[0][: 9 + number]), GREEDY, adapter=adapter)
        core.submit(create_request(submission, core.config, number))
    while core.has_work:
        for event in core.step():
            if isinstance(event, Token):
                found[int(event.request_id)].append(event.token_id)
    return found


def test_texts_with_overlap_are_those_of_the_cpu(cpu: Made, gpu: Made, kept: list[str], directory: Path) -> None:
    refs = [None, *(AdapterRef(str(n), str(directory / str(n)), digest) for n, digest in enumerate(kept))]
    want = texts(cpu, refs, max_num_seqs=2)
    assert len({tuple(text) for text in want}) == 4, "the adapters make a difference"
    assert texts(gpu, refs) == want
    assert gpu[1].overlap


# --- slots -----------------------------------------------------------------------------------------------------------


def test_an_adapter_takes_the_slot_of_one_that_was_dropped_while_its_step_is_in_flight(
    cpu: Made, gpu: Made, kept: list[str], directory: Path
) -> None:
    """The new one adapts fewer matrices and has a lower rank: nothing of the old one is left."""
    slots = host_of(gpu[0])
    assert isinstance(slots, AdapterSlots)
    path = str(directory / "3")
    want = []
    for n, adapter in enumerate((kept[0], *host_of(cpu[0]).read(path)[:1])):
        if n:
            host_of(cpu[0]).keep(*host_of(cpu[0]).read(path))
        want.append(run(cpu[0], chunk(f"{n}", TOKENS[n], 0, 40, TABLES[n])._replace(adapter=adapter)))
    host_of(cpu[0]).drop(adapter)
    digest, weights = slots.read(path)
    slot = slots.slots_of([chunk("0", TOKENS[0], 0, 1, TABLES[0])._replace(adapter=kept[0])])

    rows = [chunk(f"{n}", TOKENS[n], 0, 20, TABLES[n]) for n in range(2)]
    rest = [chunk(f"{n}", TOKENS[n], 20, 40, TABLES[n]) for n in range(2)]
    executor = gpu[0]
    executor.launch(StepPlan(0, (rows[0]._replace(adapter=kept[0]),)))
    executor.launch(StepPlan(1, (rest[0]._replace(adapter=kept[0]),)))
    slots.drop(kept[0])
    slots.keep(digest, weights)
    assert slots.slots_of([rows[1]._replace(adapter=digest)]) == slot
    executor.launch(StepPlan(2, (rows[1]._replace(adapter=digest),)))
    executor.launch(StepPlan(3, (rest[1]._replace(adapter=digest),)))
    outputs = [executor.collect().sampled for _ in range(4)]
    slots.drop(digest)
    slots.keep(kept[0], slots.read(str(directory / "0"))[1])
    assert outputs[1::2] == want


def test_keeping_an_adapter_queues_one_copy_and_waits_for_nothing(gpu: Made, directory: Path) -> None:
    slots, device = host_of(gpu[0]), gpu[0]._device  # type: ignore[attr-defined]
    digest, weights = slots.read(str(directory / "1"))
    device.asked.clear()
    slots.keep(digest, weights)
    slots.drop(digest)
    assert device.asked == ["upload"]


def test_a_row_whose_adapter_is_in_no_slot_is_refused_by_its_digest(gpu: Made, kept: list[str]) -> None:
    row = chunk("0", TOKENS[0], 0, 4, TABLES[0])._replace(adapter="ab12")
    with pytest.raises(ValueError, match="A row needs the adapter ab12, which was not kept"):
        gpu[0].launch(StepPlan(0, (row,)))


def test_a_model_without_slots_refuses_rows_with_adapters(gpu: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu[0].model, "adapters", None)
    row = chunk("0", TOKENS[0], 0, 4, TABLES[0])._replace(adapter="ab12")
    assert gpu[0].capabilities.adapters is None
    with pytest.raises(ValueError, match="A row needs the adapter ab12, and this model has none"):
        gpu[0].launch(StepPlan(0, (row,)))


def test_more_adapters_than_slots_take_turns_through_the_engine_s_cache(gpu: Made, directory: Path) -> None:
    slots = host_of(gpu[0])
    cache = AdapterCache(slots, 3)

    async def load_all() -> list[str]:
        return [await cache.load(str(directory / str(number))) for number in (0, 1, 2, 3, 0)]

    digests = asyncio.run(load_all())
    assert cache.loaded == tuple(digests[2:])
    rows = [chunk("0", TOKENS[0], 0, 1, TABLES[0])._replace(adapter=digest) for digest in cache.loaded]
    assert sorted(slots.slots_of(rows)) == [0, 1, 2]
    for digest in cache.loaded:
        cache.unload(digest)
    cache.shutdown()


@pytest.mark.slow
def test_adapters_add_to_weights_of_8_bits_what_they_add_to_others(directory: Path) -> None:
    """A matrix that is packed is another object, and adapters find theirs by the object."""
    added = {}
    for quantize in ("none", "int8"):
        executor, _ = on_device(directory, cuda_graphs="none", quantize=quantize)
        digest, weights = host_of(executor).read(str(directory / "0"))
        host_of(executor).keep(digest, weights)
        row = chunk("0", TOKENS[0], 0, 20, TABLES[0])
        plain, adapted = (logits(executor, row._replace(adapter=adapter)) for adapter in ("", digest))
        added[quantize] = adapted - plain
        executor.shutdown()
    off = (added["int8"] - added["none"]).norm() / added["none"].norm()
    assert added["none"].norm() > 1
    assert off < 0.2
