"""Owns the description of this machine as an engine would find it: cores, instructions, memory, GPUs.
Never loads torch or a library: it reads the system's own files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.host.cores import usable_threads
from engine.host.memory import HostMemory, host_memory
from kernels.cpu.processor import cpu_flags

_INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_int8": "AMX INT8",
    "amx_bf16": "AMX BF16",
}
"""Extensions that kernels make use of, from Linux's name to the usual one."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Machine:
    """`threads`: how many an engine would run, and why. `memory`: None if the system does not say. `gpus`: a name for
    each."""

    threads: tuple[int, str]
    processor: str
    instructions: tuple[str, ...]
    memory: HostMemory | None
    gpus: tuple[str, ...]


def this_machine() -> Machine:
    flags = cpu_flags()
    return Machine(
        threads=usable_threads(),
        processor=_processor(Path("/proc/cpuinfo")),
        instructions=tuple(name for flag, name in _INSTRUCTIONS.items() if flag in flags),
        memory=host_memory(),
        gpus=gpus(os.environ),
    )


def gpus(environ: Mapping[str, str], root: Path = Path("/")) -> tuple[str, ...]:
    """Return a name for each of Nvidia's GPUs that CUDA would show this process. root: where the system's files are,
    for tests."""
    devices = sorted(root.glob("dev/nvidia[0-9]*"))
    if _VISIBLE in environ:
        listed = [part.strip() for part in environ[_VISIBLE].split(",")]
        # What follows one of these is not shown either.
        hidden = [number for number, part in enumerate(listed) if part in ("", "-1")]
        devices = devices[: min([len(listed), *hidden])]
    told = sorted(root.glob("proc/driver/nvidia/gpus/*/information"))
    names = [_value(path.read_text(encoding="utf-8"), "Model") for path in told]
    return tuple(names[: len(devices)] if len(names) >= len(devices) else ["an Nvidia GPU"] * len(devices))


def _processor(cpuinfo: Path) -> str:
    try:
        return _value(cpuinfo.read_text(encoding="utf-8"), "model name")
    except OSError:
        return "an unknown processor"


def _value(text: str, key: str) -> str:
    """Return the value of the first line `key: value`."""
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), "unknown")
