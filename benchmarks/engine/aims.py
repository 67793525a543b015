"""Owns the aims of an engine on a GPU, and whether the cells of benchmarks.engine.gpu reach them.
Never measures. Steps are judged by the device's own time where it is known; what the host adds is an aim of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Cell = dict[str, Any]

DECODE = ((16, 1.3), (64, 1.35), (256, 1.5))
"""(rows, at most so many times the floor): with more rows more is read that is not weights."""
PREFILL, MIXED, GAP_PERCENT, LONGEST_GAP, LOOP = 0.6, 1.1, 3.0, 0.3, 1.5


@dataclass(frozen=True, slots=True)
class Aim:
    what: str
    value: float
    sign: str
    aim: float
    valid: bool = True

    @property
    def met(self) -> bool:
        """An aim whose cells were not valid is missed, whatever its value."""
        return self.valid and (self.value <= self.aim if self.sign == "<=" else self.value >= self.aim)


def targets(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The figures that were aimed at, and whether they were reached. What was not measured has no line."""
    kinds: dict[str, list[Cell]] = {}
    for cell in cells:
        if "failed" not in cell:
            kinds.setdefault(cell["cell"], []).append(cell)
    return [
        {"what": aim.what, "value": aim.value, "aim": f"{aim.sign} {aim.aim:g}", "valid": aim.valid, "met": aim.met}
        for aim in (*_steps(kinds), *_loads(kinds))
    ]


def _own(cell: Cell) -> tuple[float, str]:
    """Milliseconds, and whose."""
    return (cell["device_ms"], "device") if "device_ms" in cell else (cell["ms_p50"], "wall")


def _steps(kinds: dict[str, list[Cell]]) -> Iterator[Aim]:
    for cell in kinds.get("decode", ()):
        ms, whose = _own(cell)
        most = next((most for rows, most in DECODE if cell["size"] <= rows), DECODE[-1][1])
        what = f"decode, {cell['size']} rows: {whose} time over reading weights and cache once"
        yield Aim(what, ms / cell["least_ms"], "<=", most)
    for cell in kinds.get("prefill", ()):
        ms, whose = _own(cell)
        what = f"prefill of {cell['size']}: share of the matrix rate, by {whose} time"
        yield Aim(what, cell["least_ms"] / ms, ">=", PREFILL)
    for cell in kinds.get("mixed", ()):
        what = f"mixed step of {cell['size']} over prefill alone"
        yield Aim(what, cell["ms_p50"] / cell["least_ms"], "<=", MIXED, cell["valid"])


def _loads(kinds: dict[str, list[Cell]]) -> Iterator[Aim]:
    for cell in kinds.get("host_gap", ()):
        if "percent" in cell:
            yield Aim("host gap between decode steps, percent", cell["percent"], "<=", GAP_PERCENT)
        if "loop_ms" in cell:
            what = f"whole loop, {cell['size']} rows: time of a step over reading weights and cache once"
            yield Aim(what, cell["loop_ms"] / cell["least_ms"], "<=", LOOP)
    gaps = [cell for cell in kinds.get("mixed_load", ()) if "gap_max" in cell]
    if len(gaps) == 2:
        valid = bool(gaps[0]["valid"] and gaps[1]["valid"])
        yield Aim(
            "longest gap, chunks over whole prompts", gaps[0]["gap_max"] / gaps[1]["gap_max"], "<=", LONGEST_GAP, valid
        )
    both = {(cell["owner"], cell["graphs"]): cell for cell in kinds.get("owner_by_graphs", ())}
    if (best := both.get(("scheduler", True))) and (plain := both.get(("engine", False))):
        what = "engine and eager, scheduler and graphs"
        yield Aim(f"TTFT ratio, {what}", plain["ttft_ms"] / best["ttft_ms"], ">=", 5.0)
        yield Aim(f"tokens/s ratio, {what}", best["tokens_s"] / plain["tokens_s"], ">=", 3.0)
    theirs = [cell for cell in kinds.get("transformers", ()) if "tokens_s" in cell]
    if theirs and (ours := kinds.get("throughput")):
        ratio = ours[0]["tokens_s"] / theirs[0]["tokens_s"]
        yield Aim("tokens/s over transformers' generation", ratio, ">=", 2.0)
