"""Owns the contract of LoRA adapters on the native library, from PEFT's files to logits.
Never compares bits with another library's: bits are compared among the library's own steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.build.executor import create_executor
from engine.build.host_fit import host_use
from engine.config import EngineConfig
from engine.execution.executor import ModelExecutor, TorchExecutor
from engine.models.adapter_files import places_of
from engine.models.config import read_model_config
from engine.models.native import NativeModel
from engine.models.native_adapters import NativeAdapters
from engine.step import ScheduledRequest, StepPlan
from tests.engine.models.test_stored_matrix import converted
from tests.engine.models.test_stored_matrix import shape as shape  # a fixture of every test here, too
from tests.kernels.rows import seeded_generator
from tests.support.compiler import needs_compiler
from tests.support.plans import chunk, decode, run
from tests.support.tiny_models import save_model

pytestmark = needs_compiler

TOKENS = torch.randint(0, 100, (4, 40), generator=torch.Generator().manual_seed(7)).tolist()
TABLES = ((9, 3, 4), (1, 2, 5), (6, 7, 8), (0, 10, 11))
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def save_adapter(model_dir: Path, directory: Path, rank: int, *, only: str = "") -> Path:
    """Save a random adapter for the modules whose names contain `only`, beside the model that it is for."""
    generator, tensors = seeded_generator(), dict[str, Tensor]()
    for name, place in places_of(read_model_config(model_dir)).items():
        if only in name:
            a = torch.randn(rank, place.inputs, generator=generator) * place.inputs**-0.5
            b = torch.randn(place.outputs, rank, generator=generator) * 0.2
            tensors |= {f"base_model.model.{name}.lora_{side}.weight": each for side, each in (("A", a), ("B", b))}
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (directory / "adapter_config.json").write_text(json.dumps(told))
    return directory


def made(model_dir: Path, **settings: Any) -> TorchExecutor:
    fixed = {"device": "cpu", "num_kv_blocks": 12, "num_threads": 2, "max_loras": 4, "max_lora_rank": 64}
    executor, _ = create_executor(model_dir, EngineConfig(**{"dtype": "float32"} | fixed | settings))
    assert isinstance(executor, TorchExecutor)
    return executor


def keep(executor: TorchExecutor, *paths: Path) -> list[str]:
    host = executor.model.adapters
    assert host is not None
    digests = []
    for path in paths:
        digest, weights = host.read(str(path))
        host.keep(digest, weights)
        digests.append(digest)
    return digests


def logits(executor: ModelExecutor, *rows: ScheduledRequest) -> Tensor:
    return executor.logits(StepPlan(0, rows)).float().clone()


def adapted_rows(adapters: Sequence[str], start: int, end: int) -> list[ScheduledRequest]:
    return [
        chunk(str(n), TOKENS[n], start, end, TABLES[n])._replace(adapter=adapter) for n, adapter in enumerate(adapters)
    ]


def together(executor: ModelExecutor, adapters: Sequence[str], size: int) -> list[Tensor]:
    """Return the logits of each sequence, all fed side by side in chunks."""
    steps = [logits(executor, *adapted_rows(adapters, at, min(at + size, 40))) for at in range(0, 40, size)]
    return [torch.cat(parts) for parts in zip(*(step.chunk(len(adapters)) for step in steps), strict=True)]


def alone(executor: ModelExecutor, number: int, adapter: str, size: int) -> Tensor:
    ends = [(at, min(at + size, 40)) for at in range(0, 40, size)]
    rows = [chunk(str(number), TOKENS[number], *span, TABLES[number])._replace(adapter=adapter) for span in ends]
    return torch.cat([logits(executor, row) for row in rows])


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_model("llama", tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def paths(llama: Path) -> list[Path]:
    """Adapters of several ranks; the last is for values and ups alone."""
    found = [save_adapter(llama, llama.parent / f"rank {rank}", rank) for rank in (1, 16, 64)]
    (llama.parent / "some").mkdir()
    return [*found, save_adapter(llama, llama.parent / "some" / "v", 5, only="v_proj")]


@pytest.mark.parametrize("kind", ["llama", "phi3", "qwen3_moe", "gemma3"])
def test_logits_of_rows_with_several_adapters_are_those_of_torch_s_operators(kind: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path / "model")
    paths = [save_adapter(tmp_path / "model", tmp_path / str(rank), rank) for rank in (1, 16, 64)]
    found = []
    for kernels in ("native", "torch_cpu"):
        executor = made(tmp_path / "model", kernels=kernels)
        digests = keep(executor, *paths)
        found.append(together(executor, [*digests, ""], 7))
        executor.shutdown()
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


def test_an_engine_with_adapters_has_the_native_kernels_by_default(llama: Path) -> None:
    executor = made(llama, kernels="auto")
    assert isinstance(executor.model, NativeModel)
    assert isinstance(executor.capabilities.adapters, NativeAdapters)
    executor.shutdown()
    bare = made(llama, max_loras=0)
    assert bare.capabilities.adapters is None
    with pytest.raises(ValueError, match="A row needs the adapter ab12, and this model has none"):
        logits(bare, *adapted_rows(["ab12"], 0, 4))
    bare.shutdown()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_row_s_bits_depend_neither_on_chunks_nor_on_the_adapters_beside_it(
    dtype: str, quantize: str, llama: Path, paths: list[Path]
) -> None:
    executor = made(llama, dtype=dtype, quantize=quantize, batch_invariant=True)
    digests = keep(executor, *paths)
    want = [alone(executor, number, digest, 40) for number, digest in enumerate(digests)]
    for size in (1, 7, 16):
        for got, number in zip(together(executor, digests, size), range(4), strict=True):
            assert torch.equal(got, want[number])
    bare = alone(executor, 0, "", 40)
    mixed = together(executor, ["", *digests[1:]], 7)
    assert torch.equal(mixed[0], bare)
    assert all(torch.equal(got, one) for got, one in zip(mixed[1:], want[1:], strict=True))
    executor.shutdown()


def test_a_row_without_an_adapter_has_the_bits_of_an_engine_without_any(llama: Path, paths: list[Path]) -> None:
    found = []
    for most in (0, 4):
        executor = made(llama, dtype="bfloat16", max_loras=most)
        digests = keep(executor, *paths[:2]) if most else ["", ""]
        found.append(together(executor, [digests[0], "", digests[1]], 16)[1])
        executor.shutdown()
    assert torch.equal(*found)


def test_a_step_of_decodes_and_a_chunk_goes_on_with_the_adapters_of_its_rows(llama: Path, paths: list[Path]) -> None:
    found = []
    for kernels in ("native", "torch_cpu"):
        executor = made(llama, kernels=kernels)
        digests = keep(executor, *paths)
        for row in adapted_rows(digests, 0, 18):
            run(executor, row)
        rows = [decode(str(n), TOKENS[n][18], 18, TABLES[n]) for n in range(3)]
        rows.append(chunk("3", TOKENS[3], 18, 29, TABLES[3]))
        rows = [row._replace(adapter=adapter) for row, adapter in zip(rows, digests, strict=True)]
        found.append(logits(executor, *rows))
        executor.shutdown()
    torch.testing.assert_close(*found, **CLOSE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_of_rows_with_adapters_are_verified_to_the_same_bits(dtype: str, llama: Path, paths: list[Path]) -> None:
    """The second row has another adapter and wrong drafts, the third has no adapter and no drafts."""
    executor = made(llama, dtype=dtype)
    digests = [*keep(executor, *paths[1:3]), ""]
    spans = [(18, 22), (18, 21), (18, 19)]
    want = [
        alone(executor, n, digest, 1)[span[0] : span[1]]
        for n, (digest, span) in enumerate(zip(digests, spans, strict=True))
    ]
    for row in adapted_rows(digests, 0, 18):
        run(executor, row)

    def rows(tokens: Sequence[Sequence[int]]) -> list[ScheduledRequest]:
        found = [
            decode(str(n), given[0], 18, TABLES[n])._replace(token_ids=tuple(given), adapter=digest)
            for n, (given, digest) in enumerate(zip(tokens, digests, strict=True))
        ]
        return [found[2], found[0], found[1]]  # those without drafts first

    fed = [TOKENS[n][begin:end] for n, (begin, end) in enumerate(spans)]
    bare, first, second = logits(executor, *rows(fed)).split([1, 4, 3])
    for got, one in zip((first, second, bare), want, strict=True):
        assert torch.equal(got, one)
    best = [one.argmax(-1).tolist() for one in want]
    wrong = [(best[1][0] + 1) % 100, 5]
    follows = run(executor, *rows([[TOKENS[0][18], best[0][0]], [TOKENS[1][18], *wrong], [TOKENS[2][18]]]))
    assert [len(tokens) for tokens in follows] == [1, 2, 1]
    assert (follows[0], follows[1][0], follows[2]) == ((best[2][0],), best[0][0], (best[1][0],))
    executor.shutdown()


def test_adapters_come_and_go_between_steps_and_leave_no_memory(llama: Path, paths: list[Path]) -> None:
    executor = made(llama)
    host = executor.model.adapters
    assert isinstance(host, NativeAdapters)
    first, second = keep(executor, paths[2], paths[0])
    want = alone(executor, 0, second, 16)
    alone(executor, 0, first, 16)
    held = host.num_bytes
    host.drop(first)
    assert 0 < host.num_bytes < held
    assert torch.equal(alone(executor, 0, second, 16), want)
    with pytest.raises(ValueError, match=f"A row needs the adapter {first}, which was not kept"):
        logits(executor, *adapted_rows([second, first], 0, 4))
    host.drop(second)
    assert host.num_bytes == 0
    executor.shutdown()


def test_a_step_larger_than_any_before_is_recorded_with_its_adapters(llama: Path, paths: list[Path]) -> None:
    executor = made(llama, max_num_batched_tokens=16, max_prefill_tokens=16, max_num_seqs=4)
    digests = keep(executor, *paths)
    want = [alone(executor, number, digest, 16) for number, digest in enumerate(digests)]
    for got, number in zip(together(executor, digests, 40), range(4), strict=True):
        assert torch.equal(got, want[number])
    executor.shutdown()


@pytest.mark.parametrize("activations", ["auto", "int8"])
def test_adapters_add_to_weights_in_blocks_what_they_add_to_the_same_weights_unpacked(
    activations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.build.cpu.cpu_flags", lambda: frozenset({"avx512_vnni"}))
    directory = converted(tmp_path)
    path = save_adapter(directory, tmp_path / "adapter", 16)
    found = []
    for settings in ({"quantize": "stored", "activations": activations}, {"kernels": "reference"}):
        executor = made(directory, **settings)
        (digest,) = keep(executor, path)
        found.append(torch.cat(together(executor, [digest, ""], 16)))
        executor.shutdown()
    if activations == "auto":
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    off = (found[0] - found[1]).norm() / found[1].norm()
    assert off < 0.05


def test_adapters_add_to_weights_of_8_bits_what_they_add_to_others(llama: Path, paths: list[Path]) -> None:
    added = {}
    for quantize in ("none", "int8"):
        executor = made(llama, quantize=quantize)
        digest = keep(executor, paths[1])[0]
        added[quantize] = alone(executor, 0, digest, 16) - alone(executor, 0, "", 16)
        executor.shutdown()
    assert added["none"].norm() > 1
    assert (added["int8"] - added["none"]).norm() / added["none"].norm() < 0.2


@pytest.mark.parametrize("kind", ["llama", "phi3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_take_at_most_what_they_were_said_to(kind: str, dtype: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path / "model")
    executor = made(tmp_path / "model", dtype=dtype)
    keep(executor, save_adapter(tmp_path / "model", tmp_path / "adapter", 64))
    host, model = executor.model.adapters, read_model_config(tmp_path / "model")
    assert isinstance(host, NativeAdapters)
    config = EngineConfig(max_loras=3, max_lora_rank=64)
    said = host_use(tmp_path / "model", model, config, getattr(torch, dtype), native=True).adapters
    assert 0.75 * said <= 3 * host.num_bytes <= said
    executor.shutdown()


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield
