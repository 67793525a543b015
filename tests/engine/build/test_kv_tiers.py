"""Owns the start of KV tiers: what they take of the machine's memory, what is refused, and what their files depend on.
Never moves a block but to see that the mover is there."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from engine.build.executor import check_executor, create_executor
from engine.build.host_fit import HostBudget, host_use
from engine.build.kv_tiers import FEWEST_ON_DISK, GIB, kv_facts, tier_memory, tier_reasons
from engine.config import ConfigError, EngineConfig, KvTiersConfig, ResolvedConfig
from engine.host.memory import HostMemory
from engine.host.shares import Room
from engine.kv_tiers import Tier
from engine.models.config import CheckpointError, ModelConfig, read_model_config
from engine.models.kv_cache import bytes_per_block
from engine.tiers.loads import READERS
from engine.tiers.stores import queued_writes
from tests.support.compiler import needs_compiler
from tests.support.kv_tiers import Ends, MemoryFiles, load, store
from tests.support.tiny_models import save_model

A = b"a" * 16


def settings(tiers: KvTiersConfig, **more: Any) -> EngineConfig:
    plain: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "kernels": "torch_cpu", "num_kv_blocks": 8}
    return EngineConfig(kv_tiers=tiers, **plain | more)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_model("llama", made)
    return made


@pytest.fixture(scope="module")
def model(directory: Path) -> ModelConfig:
    return read_model_config(directory)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """Put files in memory in the place of a directory; return with what each was opened."""
    found: list[SimpleNamespace] = []

    def tier(path: Path, **options: Any) -> MemoryFiles:
        found.append(SimpleNamespace(path=path, files=MemoryFiles(), **options))
        files: MemoryFiles = found[-1].files
        return files

    for name, content in {
        "disk": {"DiskTier": tier},
        "fingerprint": {"fingerprint": lambda where, facts: repr((where, sorted(facts.items()))).encode()},
        "cipher": {"read_key": lambda path: path.read_bytes()},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, f"engine.tiers.{name}", module)
    return found


# --- memory ----------------------------------------------------------------------------------------------------------


def test_without_tiers_there_is_no_mover_and_no_memory_for_one(directory: Path, model: ModelConfig) -> None:
    config = settings(KvTiersConfig())
    assert tier_memory(model, config, torch.float32).total == 0
    executor, resolved = create_executor(directory, config)
    assert executor.capabilities.kv_mover is None
    assert "kv_tiers" not in resolved.reasons
    executor.shutdown()


@pytest.mark.parametrize(
    ("dtype", "kept"), [("float32", "auto"), ("bfloat16", "auto"), ("float32", "int8"), ("float32", "fp8_e4m3")]
)
def test_the_host_tier_has_as_many_blocks_as_fit_into_its_memory(model: ModelConfig, dtype: str, kept: str) -> None:
    config = settings(KvTiersConfig(host_memory_gib=0.01), dtype=dtype, kv_cache_dtype=kept)
    stored = {"auto": getattr(torch, dtype), "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}[kept]
    size = bytes_per_block(model, config.block_size, stored)
    memory = tier_memory(model, config, getattr(torch, dtype))
    assert memory.block_bytes == size
    assert memory.host_bytes <= 0.01 * GIB < memory.host_bytes + size
    assert memory.buffers == 0, "only a disk needs any"


@pytest.mark.parametrize(("narrow", "kept"), [("int8", torch.int8), ("fp8_e4m3", torch.float8_e4m3fn)])
def test_a_narrow_tier_has_as_many_narrow_blocks_as_fit_into_its_memory(
    directory: Path, model: ModelConfig, narrow: Any, kept: torch.dtype
) -> None:
    """So do buffers, and the fewest blocks of a disk, and what the start tells."""
    tiers = KvTiersConfig(host_memory_gib=0.01, disk_path="/not/made", disk_gib=1.0, dtype=narrow)
    memory, size = tier_memory(model, settings(tiers), torch.float32), bytes_per_block(model, 16, kept)
    assert memory.block_bytes == size < bytes_per_block(model, 16, torch.float32) / 3
    assert memory.host_blocks == int(0.01 * GIB) // size
    assert memory.buffer_bytes == (queued_writes(size) + READERS) * size
    use = host_use(directory, model, settings(tiers), torch.float32, native=False)
    assert (use.host_tier, use.disk_buffers) == (memory.host_bytes, memory.buffer_bytes)
    assert tier_reasons(settings(tiers), memory)["kv_tiers"] == (
        f"asked for; {memory.host_blocks} blocks in 0.01 GiB of the machine's memory and about {GIB // size} blocks in "
        f"1 GiB of /not/made, in {narrow}"
    )
    small = KvTiersConfig(disk_path="kv", disk_gib=FEWEST_ON_DISK * size / GIB, dtype=narrow)
    tier_memory(model, settings(small), torch.float32)
    with pytest.raises(ConfigError, match=f"take {FEWEST_ON_DISK * size} bytes"):
        tier_memory(model, settings(dataclasses.replace(small, disk_gib=0.99 * small.disk_gib)), torch.float32)
    resolved = check_executor(directory, settings(tiers))
    assert (resolved.tier_block_bytes, resolved.kv_block_bytes) == (size, bytes_per_block(model, 16, torch.float32))


def test_tiers_count_in_what_the_engine_takes_with_buffers_for_the_disk(directory: Path, model: ModelConfig) -> None:
    tiers = KvTiersConfig(host_memory_gib=0.5, disk_path="/not/made")
    use = host_use(directory, model, settings(tiers), torch.float32, native=False)
    none = host_use(directory, model, settings(KvTiersConfig()), torch.float32, native=False)
    size = tier_memory(model, settings(tiers), torch.float32).block_bytes
    assert use.total - none.total == use.host_tier + use.disk_buffers
    assert use.host_tier == 0.5 * GIB // size * size
    assert use.disk_buffers == (queued_writes(size) + READERS) * size
    assert "kv_tiers.host_memory_gib 0.50" in use.text()
    assert "buffers for kv_tiers.disk_path 0." in use.text()


def test_a_host_tier_that_does_not_fit_is_refused_by_name_with_both_numbers(
    directory: Path, model: ModelConfig
) -> None:
    use = host_use(directory, model, settings(KvTiersConfig(host_memory_gib=7.5)), torch.float32, native=False)
    memory = HostMemory(8 * GIB, 8 * GIB, "a test's file")
    budget = HostBudget(use=use, room=Room(free=7 * GIB, share=7 * GIB, engines=1, memory=memory))
    with pytest.raises(ConfigError, match=r"kv_tiers.host_memory_gib 7.50\), but 8.00 GiB of 8.00 GiB are free"):
        budget.blocks(settings(KvTiersConfig()), 1000, 0, 10)


@pytest.mark.parametrize("start", [check_executor, create_executor])
def test_an_engine_whose_host_tier_does_not_fit_does_not_start(start: Any, directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_tiers.host_memory_gib 1000000\.00\), but"):
        start(directory, settings(KvTiersConfig(host_memory_gib=1e6)))


def test_tiers_that_are_too_small_are_refused_with_the_numbers(model: ModelConfig) -> None:
    size = bytes_per_block(model, 16, torch.float32)
    with pytest.raises(ConfigError) as refused:
        tier_memory(model, settings(KvTiersConfig(host_memory_gib=1e-6)), torch.float32)
    assert str(refused.value) == (
        f"kv_tiers.host_memory_gib is 1e-06 (1073 bytes), but one block of this model takes {size} bytes."
    )
    with pytest.raises(ConfigError) as refused:
        tier_memory(model, settings(KvTiersConfig(disk_path="kv", disk_gib=2**-20)), torch.float32)
    assert f"kv_tiers.disk_gib is 9.53674e-07 (1024 bytes), but {FEWEST_ON_DISK} blocks" in str(refused.value)
    assert f"take {FEWEST_ON_DISK * size} bytes" in str(refused.value)
    enough = KvTiersConfig(host_memory_gib=size / GIB, disk_path="kv", disk_gib=FEWEST_ON_DISK * size / GIB)
    assert tier_memory(model, settings(enough), torch.float32).host_blocks == 1


# --- the mover -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["torch_cpu", pytest.param("native", marks=needs_compiler)])
def test_an_engine_has_a_mover_of_its_own_cache_and_ends_it(directory: Path, kernels: str) -> None:
    executor, resolved = create_executor(directory, settings(KvTiersConfig(host_memory_gib=0.01), kernels=kernels))
    mover = executor.capabilities.kv_mover
    assert mover is not None
    assert mover.tiers == (Tier.HOST,)
    assert resolved.reasons["kv_tiers"] == f"asked for; {mover.host_blocks} blocks in 0.01 GiB of the machine's memory"
    keys = executor.model.cache.layers[-1][0]
    keys[3] = 7
    mover.begin((move := store(Tier.HOST, A, 3),))
    Ends(mover).of(move)
    keys[3] = 0
    mover.begin((move := load(Tier.HOST, A, 5),))
    assert Ends(mover).errors(move) == [""]
    assert keys[5].eq(7).all()
    del keys
    executor.shutdown()
    mover.begin((move := load(Tier.HOST, A, 5),))
    assert Ends(mover).errors(move) == ["the tier's thread has ended"]


def test_the_directory_is_opened_with_what_its_files_depend_on(
    directory: Path, tmp_path: Path, opened: list[SimpleNamespace]
) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    tiers = KvTiersConfig(disk_path=str(tmp_path / "kv"), disk_gib=2.0, disk_key_file=str(key))
    executor, resolved = create_executor(directory, settings(tiers))
    (disk,) = opened
    assert (disk.path, disk.capacity_bytes, disk.key) == (tmp_path / "kv", 2 * GIB, bytes(32))
    mover = executor.capabilities.kv_mover
    assert mover is not None
    assert (mover.tiers, mover.host_blocks, mover.block_bytes) == ((Tier.DISK,), 0, disk.block_bytes)
    assert resolved.reasons["kv_tiers"].endswith(f"blocks in 2 GiB of {tmp_path / 'kv'}, encrypted")
    assert b"'dtype', 'float32'" in disk.fingerprint
    executor.shutdown()
    assert disk.files.closed == 1


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o440, False), (0o444, True), (0o604, True)])
def test_a_key_file_that_every_user_may_read_is_told_once_with_its_mode(
    directory: Path,
    tmp_path: Path,
    opened: list[SimpleNamespace],
    caplog: pytest.LogCaptureFixture,
    mode: int,
    warned: bool,
) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    key.chmod(mode)
    executor, _ = create_executor(directory, settings(KvTiersConfig(disk_path="kv", disk_key_file=str(key))))
    executor.shutdown()
    assert len(opened) == 1
    assert caplog.messages.count(f"kv_tiers.disk_key_file {key} has mode {mode:04o}: every user may read the key.") == (
        1 if warned else 0
    )


def test_a_check_opens_no_directory_but_reads_the_key(
    directory: Path, tmp_path: Path, opened: list[SimpleNamespace]
) -> None:
    check_executor(directory, settings(KvTiersConfig(disk_path=str(tmp_path / "kv"))))
    with pytest.raises(FileNotFoundError):
        check_executor(directory, settings(KvTiersConfig(disk_path="kv", disk_key_file=str(tmp_path / "none"))))
    assert not opened


def test_a_directory_is_closed_when_the_weights_cannot_be_read(
    directory: Path, monkeypatch: pytest.MonkeyPatch, opened: list[SimpleNamespace]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        assert opened, "a directory that cannot be used is refused before weights are read"
        raise CheckpointError("broken")

    monkeypatch.setattr("engine.build.model.load_weights", fail)
    with pytest.raises(CheckpointError, match="broken"):
        create_executor(directory, settings(KvTiersConfig(disk_path="kv")))
    assert opened[0].files.closed == 1


# --- what files depend on --------------------------------------------------------------------------------------------


def facts(model: ModelConfig, resolved: ResolvedConfig, **changes: Any) -> dict[str, str]:
    return kv_facts(model, settings(**{"tiers": KvTiersConfig(), "kernels": "auto"} | changes), resolved)


def test_each_setting_that_changes_a_bit_of_kv_is_a_fact(
    directory: Path, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is the release, and what the kernels were chosen to be."""
    resolved = check_executor(directory, settings(KvTiersConfig()))
    same = facts(model, resolved)
    for changes in (
        {"kv_cache_dtype": "int8"},
        {"quantize": "int8"},
        {"quantize": "stored", "activations": "int8"},
        {"load_format": "dummy"},
        {"block_size": 32},
        {"tiers": KvTiersConfig(disk_path="kv", dtype="int8")},
    ):
        assert facts(model, resolved, **changes) != same, changes
    for other in ({"dtype": "bfloat16"}, {"device": "a GPU"}, {"kernels": "reference"}):
        assert facts(model, dataclasses.replace(resolved, **other)) != same, other
    monkeypatch.setattr("engine.build.kv_tiers.version", lambda name: f"another {name}")
    assert facts(model, resolved) != same
    monkeypatch.undo()
    for unseen in (
        {"tiers": KvTiersConfig(disk_path="kv")},
        {"max_num_seqs": 3},
        {"num_kv_blocks": 99},
        {"max_model_len": 17},
    ):
        assert facts(model, resolved, **unseen) == same, unseen


def test_only_a_scaled_rotation_depends_on_the_longest_request(directory: Path, model: ModelConfig) -> None:
    resolved = check_executor(directory, settings(KvTiersConfig()))
    longer = dataclasses.replace(resolved, max_model_len=resolved.max_model_len + 1)
    assert facts(model, longer) == facts(model, resolved)
    scaled = dataclasses.replace(model, rope=dataclasses.replace(model.rope, rope_type="dynamic"))
    assert facts(scaled, longer) != facts(scaled, resolved)


@needs_compiler
def test_the_native_kernels_code_and_instructions_are_a_fact(
    directory: Path, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = check_executor(directory, settings(KvTiersConfig(), kernels="native"))
    same = facts(model, resolved)
    assert same["kernels"] == "native"
    monkeypatch.setattr("kernels.cpu.native.library.vector_level", lambda: "another")
    assert facts(model, resolved) != same
