"""Owns the measurement of a prompt that comes back: from the host tier, and from a directory after a restart.
Never lets a wrong answer pass: answers that differ from the computed one by a bit, or that nothing was loaded for, end
it."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.tiers.driver import Asked, DrivenEngine
from benchmarks.engine.tiers.figures import NOT_MEASURED, shown, spreads
from engine.config import KvTiersConfig
from engine.kv_tiers import Tier

MakeEngine = Callable[..., AbstractContextManager[DrivenEngine]]
"""Builds an engine with the given settings."""
WARM_UP = (1,) * 16
"""What an engine computes first does not count."""
LEAST_SHARE = 0.95
"""Share of a prompt's tokens that must have been loaded."""
ROWS = {
    "host": "host tier, which has what the device lost",
    "disk": "disk tier after a restart, files in the page cache",
    "disk_cold": "disk tier after a restart, files read from the disk",
}
AIM = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmLoad:
    """A prompt that is asked again. Sizes are in tokens."""

    prompt: int = 8000
    answer: int = 32
    logprobs: int = 5
    host_gib: float = 1.0
    disk_gib: float = 4.0


def measure_warm(
    make: MakeEngine, load: WarmLoad, rounds: int, seed: int, directory: Path | None = None
) -> dict[str, Any]:
    """Measure `rounds` fresh prompts. directory: where the files go; None: the system's place for such."""
    found = []
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="kv-tiers-", dir=directory) as path:
            found.append(one_round(make, load, random.Random(seed + number), Path(path)))
        print("warm", {name: round(value, 3) for name, value in found[-1].items()}, flush=True)
    return {"rounds": rounds, "prompt_tokens": load.prompt, "answer_tokens": load.answer, **spreads(found)}


def one_round(make: MakeEngine, load: WarmLoad, draw: random.Random, path: Path) -> dict[str, float]:
    """Return milliseconds to the first token, and their ratios to computing the prompt."""
    files = KvTiersConfig(disk_path=str(path), disk_gib=load.disk_gib)
    both = KvTiersConfig(host_memory_gib=load.host_gib, disk_path=str(path), disk_gib=load.disk_gib)
    asked: dict[str, Asked] = {}
    with make(num_kv_blocks=_blocks(load), max_model_len=load.prompt + load.answer, kv_tiers=both) as engine:
        prompt, other = (tuple(draw.randrange(engine.config.vocab_size) for _ in range(load.prompt)) for _ in range(2))
        _ask(engine, WARM_UP, load)
        asked["stored"] = _ask(engine, prompt, load)
        _ask(engine, other, load)  # takes the whole cache
        asked["host"] = _ask(engine, prompt, load)
        engine.settle()
        num_stored = engine.blocks_in(Tier.DISK)
    if num_stored < load.prompt // engine.config.block_size:
        raise RuntimeError(f"the disk tier has {num_stored} blocks, fewer than the prompt's")
    asked["disk"] = _ask_anew(make, load, files, prompt)
    drop_pages(path)
    asked["disk_cold"] = _ask_anew(make, load, files, prompt)
    asked["computed"] = _ask_anew(make, load, KvTiersConfig(), prompt)
    check(asked, load)
    times = {name: 1000 * one.first_s for name, one in asked.items()}
    ratios = {name: one.first_s / asked["computed"].first_s for name, one in asked.items() if name != "computed"}
    return {f"{name}_ms": ms for name, ms in times.items()} | {f"{name}_ratio": ratio for name, ratio in ratios.items()}


def _blocks(load: WarmLoad) -> int:
    """Return a cache that holds one prompt with its answer, and little else."""
    return -(-(load.prompt + load.answer) // 16) + 4


def _ask(engine: DrivenEngine, prompt: Sequence[int], load: WarmLoad) -> Asked:
    return engine.ask(prompt, load.answer, logprobs=load.logprobs)


def _ask_anew(make: MakeEngine, load: WarmLoad, tiers: KvTiersConfig, prompt: Sequence[int]) -> Asked:
    """Ask a new engine, once it knows what the directory has."""
    settings = {"num_kv_blocks": _blocks(load), "max_model_len": load.prompt + load.answer, "kv_tiers": tiers}
    with make(**settings) as engine:
        _ask(engine, WARM_UP, load)
        engine.settle()
        return _ask(engine, prompt, load)


def check(asked: Mapping[str, Asked], load: WarmLoad) -> None:
    """Check that all answers are the same to the bit, and where each prompt came from.

    Raises:
        RuntimeError: they are not, or it came from elsewhere.
    """
    for name, one in asked.items():
        if one.answer != asked["computed"].answer:
            raise RuntimeError(f"the answer of {name!r} differs from that of the computed prompt")
        least, most = (0, 0) if name in ("computed", "stored") else (LEAST_SHARE * load.prompt, load.prompt)
        if not least <= one.cached_tokens <= most:
            raise RuntimeError(f"{one.cached_tokens} tokens of {name!r} were there, not {least:g} to {most:g}")


def drop_pages(directory: Path) -> None:
    """Have the files' content leave the machine's page cache, so that it must be read again. A file system in memory
    keeps it."""
    for path in (path for path in directory.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not written yet would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def table(phase: Mapping[str, Any] | None) -> str:
    """Render the table of prompts that come back: milliseconds, and the ratio to computing."""
    if phase is None:
        return NOT_MEASURED
    told = f"{phase['prompt_tokens']:,} tokens, another prompt in each of {phase['rounds']} rounds."
    lines = [told, "", "| the prompt's KV | first token, ms | ÷ computing |", "|---|--:|--:|"]
    lines.append(f"| computed, no tiers | {shown(phase['computed_ms'])} | 1 |")
    lines.append(f"| computed and stored in both tiers | {_row(phase, 'stored')} |")
    lines += [f"| {text} | {_row(phase, name)} |" for name, text in ROWS.items()]
    return "\n".join(lines)


def _row(phase: Mapping[str, Any], name: str) -> str:
    return f"{shown(phase[f'{name}_ms'])} | {shown(phase[f'{name}_ratio'], 3)}"
