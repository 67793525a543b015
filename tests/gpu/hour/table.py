"""Owns what is printed at the end of the hour: each part's outcome, and each aim with its measured value.
Never measures, and never leaves out what was not measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.engine.gpu import BATCH_INVARIANT
from tests.gpu.hour.phases import LARGE, NARROW_SHAPES, OVER_NARROW, SMALL, Phase
from tests.gpu.hour.running import Outcome
from tests.gpu.hour.store import Store

PACKAGE_SHARE = 0.95
NARROW_BYTES, NARROW_SHARE = 0.52, 0.65
"""The bytes of K and V in 8 bits over those in bfloat16, scales included, which predict the time of a decode step that
reads them from memory; and the aim for that time, since numbers are widened besides."""
EXPECTED = (
    *((LARGE, f"decode, {rows} rows") for rows in (1, 16, 64, 256)),
    (LARGE, "prefill of 8192"),
    (SMALL, "whole loop, 64 rows"),
    (LARGE, "host gap"),
    (LARGE, "longest gap"),
    (LARGE, "TTFT ratio"),
    (LARGE, "tokens/s ratio"),
    *((LARGE, f"{cell}{BATCH_INVARIANT}, {size}") for cell, size in (("decode", 64), ("prefill", 8192))),
    ("", "attention, decode 64 x 1024"),
    *(("", f"attention, {shape}: time with K and V in") for shape in NARROW_SHAPES),
)
"""(model, how the aim's text begins) of everything that the hour has to measure."""
INVARIANT_SHARE = 1.1


class Aim(NamedTuple):
    model: str
    what: str
    value: float
    aim: str
    met: bool
    valid: bool = True


def aims_of(store: Store) -> list[Aim]:
    """Return the aims of all benchmarks that kept something."""
    found = []
    for outcome in store.outcomes.get("aims", {}).values():
        document = outcome.results[0] if outcome.results else None
        if isinstance(document, dict):
            model = document.get("model", "")
            found += [
                Aim(model, aim["what"], aim["value"], aim["aim"], aim["met"], aim["valid"])
                for aim in document.get("targets", ())
            ]
    by_shape: dict[str, dict[str, float]] = {}
    for cell in (store.result("aims", "packages") or {}).get("cells", ()):
        if "us" in cell:
            by_shape.setdefault(cell["shape"], {})[cell["by"]] = cell["us"]
    return found + _beside_packages(by_shape) + _over_narrow(by_shape) + _batch_invariant(store)


def _batch_invariant(store: Store) -> list[Aim]:
    """Return the device's time of batch-invariant steps relative to others'."""
    times: dict[tuple[str, int], float] = {}
    for part in ("steps", "batch-invariant"):
        for cell in (store.result("aims", part) or {}).get("cells", ()):
            if "device_ms" in cell:
                times[cell["cell"], cell["size"]] = cell["device_ms"]
    found = []
    for (cell, size), own in times.items():
        ordinary = times.get((cell.removesuffix(BATCH_INVARIANT), size))
        if cell.endswith(BATCH_INVARIANT) and ordinary is not None:
            share, what = own / ordinary, f"{cell}, {size}: time over an ordinary step's"
            found.append(Aim(LARGE, what, share, f"<= {INVARIANT_SHARE:g}", share <= INVARIANT_SHARE))
    return found


def _over_narrow(by_shape: Mapping[str, Mapping[str, float]]) -> list[Aim]:
    """Return the time of Triton's attention over K and V in 8 bits relative to the model's type."""
    found = []
    for shape in NARROW_SHAPES:
        times = by_shape.get(shape, {})
        for name in [name for name in times if OVER_NARROW in name and "triton" in times]:
            share, kept_in = times[name] / times["triton"], name.partition(OVER_NARROW)[2]
            what = f"attention, {shape}: time with K and V in {kept_in}, which are {NARROW_BYTES:g} of the bytes"
            found.append(Aim("", what, share, f"<= {NARROW_SHARE:g}", share <= NARROW_SHARE))
    return found


def _beside_packages(by_shape: Mapping[str, Mapping[str, float]]) -> list[Aim]:
    """Return, for each shape, Triton's speed relative to the best package."""
    found = []
    for shape, times in by_shape.items():
        others = {name: us for name, us in times.items() if name != "triton" and OVER_NARROW not in name}
        if "triton" in times and others:
            best = min(others, key=lambda name: others[name])
            share = others[best] / times["triton"]
            what = f"attention, {shape}: speed over {best}"
            found.append(Aim("", what, share, f">= {PACKAGE_SHARE:g}", share >= PACKAGE_SHARE))
    return found


def missing_of(aims: Sequence[Aim]) -> list[str]:
    return [
        f"{model}: {what}" if model else what
        for model, what in EXPECTED
        if not any(aim.model == model and aim.what.startswith(what) for aim in aims)
    ]


def lines_of(phases: Sequence[Phase], store: Store, heading: str) -> list[str]:
    """Return the table's lines."""
    lines = [heading]
    for phase in phases:
        outcomes = store.outcomes.get(phase.name)
        if outcomes is None:
            lines.append(f"{phase.name}: not run")
            continue
        lines.append(f"{phase.name}: {phase.title}")
        lines += [f"  {_line(outcome)}" for outcome in outcomes.values()]
    peaks = (store.result("right", "machine") or {}).get("peaks")
    if peaks:
        lines.append("peaks: copy {copy_gb_s:.0f} GB/s, matrix {matrix_gflop_s:.0f} GFLOP/s".format(**peaks))
    if "aims" in store.outcomes:
        aims = aims_of(store)
        lines += [f"  {_aim_line(aim)}" for aim in aims]
        lines += [f"  {missing}: not measured" for missing in missing_of(aims)]
    return lines


def _line(outcome: Outcome) -> str:
    why = f": {outcome.why}" if outcome.why else ""
    tests = [test for result in outcome.results if isinstance(result, dict) for test in result.get("tests", ())]
    counts = [
        f"{number} {word}"
        for word in ("passed", "failed", "skipped")
        if (number := sum(test["outcome"] == word for test in tests))
    ]
    missing = [result["missing"] for result in outcome.results if isinstance(result, dict) and "missing" in result]
    notes = "; ".join([*([", ".join(counts)] if counts else []), *(str(each) for each in missing if each)])
    return f"{outcome.name:16} {outcome.word.upper():11} {outcome.seconds:6.1f} s{why}{f' ({notes})' if notes else ''}"


def _aim_line(aim: Aim) -> str:
    word = "met" if aim.met else "MISSED" if aim.valid else "NOT VALIDLY MEASURED"
    return f"{f'{aim.model}: ' if aim.model else ''}{aim.what}: {aim.value:.2f} (aim {aim.aim}): {word}"
