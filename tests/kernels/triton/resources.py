"""Owns what the compiled kernels take of a GPU: `python -m tests.kernels.triton.resources` writes the table of it.
Never needs a GPU: Triton brings assembler and disassembler."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("resources.json")
CAPABILITIES = ("8.0", "9.0", "10.0")
SHAPE = ("--head-dims", "128", "--groups", "4")
"""Attention's of an 8B model (Llama 3.1, Qwen3): 32 heads, 8 KV heads."""

REGISTERS, REGISTERS_AT_A_TIME = 65_536, 256
"""What a multiprocessor has, and the unit in which a warp gets them (CUDA C++ Programming Guide)."""
THREADS, MOST_PROGRAMS = 2048, 32
"""The most on a multiprocessor with compute capability 8.0, 9.0 or 10.0."""
SHARED_KIB = {"8.0": 164, "9.0": 228, "10.0": 228}
"""What a multiprocessor has; each program takes 1 KiB more than it asks for."""

TENSOR_COLUMNS = 512
"""What the tensor cores' own memory on a multiprocessor has, from compute capability 10.0 on."""


@dataclass(frozen=True)
class Code:
    """What a compiled kernel's machine code says."""

    registers: int
    """Per thread."""
    local_accesses: int
    """Loads and stores of local memory: spilled registers, or an array with a computed index."""
    products: str
    """The tensor cores' instruction: `wgmma`, `tcgen05`, `mma`, or none."""
    wide_copies: int
    """Asynchronous copies of 16 bytes a thread to shared memory."""


def read_code(cubin: bytes) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, assembly = (_disassembled(file.name, option) for option in ("-res-usage", "-sass"))
    registers = re.search(r"\bREG:(\d+)", usage)
    assert registers is not None, usage
    # The letter before names the operands: H has 16 bits, Q eight.
    kinds = {"wgmma": r"\b[HQ]GMMA\b", "tcgen05": r"\bUTC\w*MMA\b", "mma": r"\b[HQ]MMA\b"}
    return Code(
        registers=int(registers[1]),
        local_accesses=len(re.findall(r"\b(?:LDL|STL)\b", assembly)),
        products=next((name for name, pattern in kinds.items() if re.search(pattern, assembly)), ""),
        wide_copies=len(re.findall(r"\bLDGSTS\.\S*128\b", assembly)),
    )


def _disassembled(path: str, option: str) -> str:
    from triton import knobs

    done = subprocess.run([knobs.nvidia.cuobjdump.path, option, path], capture_output=True, text=True, check=True)
    return done.stdout


def programs_per_multiprocessor(capability: str, registers: int, shared_bytes: int, warps: int) -> int:
    """0: the kernel needs more than a multiprocessor has."""
    per_warp = -(-32 * registers // REGISTERS_AT_A_TIME) * REGISTERS_AT_A_TIME
    limits = (
        REGISTERS // (per_warp * warps),
        SHARED_KIB[capability] * 1024 // (shared_bytes + 1024),
        THREADS // (32 * warps),
        MOST_PROGRAMS,
    )
    return min(limits)


def compile_for(capability: str, cache: str, *arguments: str) -> list[dict[str, Any]]:
    """Compile kernels in another process: in this one, Triton may interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.compiled", capability, *arguments],
        env=environment | {"TRITON_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert all(kernel["cubin_bytes"] for kernel in found)
    return found


def table_of(capability: str, kernels: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what each variant takes, by its name."""
    found = {}
    for kernel in kernels:
        code = Code(**kernel["code"])
        programs = programs_per_multiprocessor(capability, code.registers, kernel["shared_bytes"], kernel["warps"])
        if kernel["tensor_columns"] > TENSOR_COLUMNS:
            programs = 0  # the code is a trap, and autotuning skips it
        found[kernel["variant"]] = {
            "registers": code.registers,
            "shared_bytes": kernel["shared_bytes"],
            "programs": programs,
            "local_accesses": code.local_accesses,
            "products": code.products,
            "wide_copies": code.wide_copies,
        }
    return dict(sorted(found.items()))


def written(document: Mapping[str, Any]) -> str:
    """Return the table as JSON with a line for each variant."""
    lines = [f'{{"triton": {json.dumps(document["triton"])},']
    for number, capability in enumerate(CAPABILITIES):
        rows = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in document[capability].items()]
        lines.append(
            f'"{capability}": {{\n' + ",\n".join(rows) + ("\n}}" if number == len(CAPABILITIES) - 1 else "\n},")
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.kernels.triton.resources",
        description="Compile every configuration of every kernel for each kind of GPU, and write what they take.",
    )
    parser.parse_args()
    import triton

    document: dict[str, Any] = {"triton": triton.__version__}
    with tempfile.TemporaryDirectory() as cache:
        for capability in CAPABILITIES:
            document[capability] = table_of(capability, compile_for(capability, cache, "--resources", *SHAPE))
    TABLE.write_text(written(document), encoding="utf-8")


if __name__ == "__main__":
    main()
