"""Owns a pretended GPU: the engine's whole path on a device runs on the CPU, with memory that a test makes up.
Never hides the order of operations: what is read back is as it was when the download was queued,
and captures do their work again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.execution.device import HostDevice

MIB = 2**20
VOCAB, EOS = 272, 256
"""The vocabulary of Grammars.of_bytes: a token a byte, then special ones."""


class FakeDevice(HostDevice):
    """A device of compute capability 9.0 and little memory, which is allocated for real. `free` has the answers, in
    MiB, to each question for free memory; the last one is repeated."""

    name = "fake GPU"
    capability = (9, 0)
    captures = True

    def __init__(self, free: Sequence[float] = (15, 12, 11.5, 10, 9.25), total: float = 16) -> None:
        self._free, self._total = [*free], total
        self.asked: list[str] = []
        self.uploaded: list[int] = []
        """How many numbers each upload had."""

    def memory(self) -> tuple[int, int]:
        free = self._free.pop(0) if len(self._free) > 1 else self._free[0]
        return int(free * MIB), int(self._total * MIB)

    def release_unused(self) -> None:
        self.asked.append("release")

    def upload(self, host: Tensor, into: Tensor | None = None) -> Tensor:
        assert host.device.type == "cpu"
        self.asked.append("upload")
        self.uploaded.append(host.numel())
        return host.clone() if into is None else into.copy_(host)

    def download(self, tensors: Sequence[Tensor]) -> Any:
        self.asked.append("download")
        return _Snapshot(self, [tensor.clone() for tensor in tensors])

    def capture(self, work: Callable[[], None], beside: Any = None) -> Any:
        self.asked.append("capture")
        work()
        return _Replay(self, work)


@dataclass
class _Snapshot:
    device: FakeDevice
    tensors: list[Tensor]

    def wait(self) -> list[Tensor]:
        self.device.asked.append("wait")
        return self.tensors


@dataclass
class _Replay:
    device: FakeDevice
    work: Callable[[], None]

    def replay(self) -> None:
        self.device.asked.append("replay")
        self.work()


class CachingDevice(FakeDevice):
    """A device whose memory behaves as under torch's allocator: what a step gave up stays cached until it is released
    or wanted. A capture runs its work once, releases what is cached, and then keeps what the work takes, in the pool
    that it shares.

    It counts bytes of what it is told of: by `hold`, `give_up`, and `use` for the time of a forward pass."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self.held = self.cached = 0
        self._bytes = total
        self._pool: _Pool | None = None

    def memory(self) -> tuple[int, int]:
        return self._bytes - self.held - self.cached, self._bytes

    def release_unused(self) -> None:
        super().release_unused()
        self.cached = 0

    def hold(self, size: int) -> None:
        if self.held + size > self._bytes:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        self.held += size
        self.cached = min(self.cached, self._bytes - self.held)

    def give_up(self, size: int) -> None:
        self.held -= size
        self.cached += size

    def use(self, size: int) -> None:
        if self._pool is not None:
            self._pool.grow(size)
            return
        kept = self.cached
        self.hold(size)
        self.give_up(size)
        self.cached = max(kept, size)

    def capture(self, work: Callable[[], None], beside: Any = None) -> Any:
        self.asked.append("capture")
        work()
        self.cached = 0
        pool = self._pool = _Pool(self) if beside is None else beside
        work()
        self._pool = None
        return pool


class _Pool:
    """The memory pool of captures, as long as one of them lives. Nothing can be replayed."""

    def __init__(self, device: CachingDevice) -> None:
        self._device, self._size = device, 0

    def grow(self, size: int) -> None:
        self._device.hold(max(0, size - self._size))
        self._size = max(size, self._size)

    def __del__(self) -> None:
        self._device.give_up(self._size)


def write_model(directory: Path, **changes: Any) -> Path:
    """Write a config.json for dummy weights: a tiny Llama over bytes, whose end-of-sequence token is EOS."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": EOS,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


class MetaDevice(FakeDevice):
    """A device whose tensors have no values: reading one back raises an exception,
    and so do most operations that mix devices."""

    torch_device = torch.device("meta")

    def upload(self, host: Tensor, into: Tensor | None = None) -> Tensor:
        assert host.device.type == "cpu"
        there = host.to("meta")
        return there if into is None else into.copy_(there)


class MetaFlash:
    """The calls of FlashAttention-2, or of FlashAttention-3 if `whole`, on tensors without values."""

    def __init__(self, *, whole: bool) -> None:
        self._table = "page_table" if whole else "block_table"

    def flash_attn_with_kvcache(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return self._attend(q, k, v, options["cache_seqlens"], options[self._table])

    def flash_attn_varlen_func(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return self._attend(q, k, v, options["cu_seqlens_q"], options["cu_seqlens_k"], options[self._table])

    def _attend(self, *tensors: Tensor) -> Tensor:
        assert {tensor.device.type for tensor in tensors} == {"meta"}
        return torch.empty_like(tensors[0])
