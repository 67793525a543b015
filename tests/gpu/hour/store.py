"""Owns the hour's folder: a file for each phase, which grows as results come, a summary and the table.
Never more than eight files, and never half of one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.results import write_whole
from tests.gpu.hour.running import Outcome

SUMMARY, TABLE = "summary.json", "table.txt"


class Store:
    """The results of the hour, by phase. Those that earlier runs left of other phases are kept and read again."""

    def __init__(self, folder: Path, phases: Sequence[str], device: str) -> None:
        self._folder, self._device = folder, device
        self._more: dict[str, dict[str, object]] = {}
        self.outcomes: dict[str, dict[str, Outcome]] = {}
        """Outcomes by phase and part."""
        for phase in phases:
            if found := self._read(phase):
                self.outcomes[phase] = found

    def _read(self, phase: str) -> dict[str, Outcome]:
        """Read a phase's outcomes, if they are of the same device: a rehearsal's do not count as results."""
        try:
            document = json.loads((self._folder / f"{phase}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if document.get("device") != self._device:
            return {}
        names = {each.name for each in dataclasses.fields(Outcome)}
        parts = [{name: part[name] for name in names} for part in document["parts"]]
        return {part["name"]: Outcome(**part | {"results": tuple(part["results"])}) for part in parts}

    def begin(self, phase: str, *, keep: bool, **more: object) -> None:
        """Begin a phase. keep: keep its earlier outcomes; parts that run again replace theirs. more: what is to be
        stored with the phase before it runs."""
        if not keep:
            self.outcomes[phase] = {}
        self.outcomes.setdefault(phase, {})
        self._more[phase] = more
        with suppress(OSError):  # reported with the first part
            self._write(phase)

    def keep(self, phase: str, outcome: Outcome) -> Outcome:
        """Write the phase's file. Failing to write is an outcome of its own, and the run continues."""
        self.outcomes[phase][outcome.name] = outcome
        try:
            self._write(phase)
        except OSError as error:
            outcome = dataclasses.replace(outcome, word="not kept", why=f"{outcome.word}, but: {error}")
            self.outcomes[phase][outcome.name] = outcome
        return outcome

    def _write(self, phase: str) -> None:
        parts = [dataclasses.asdict(outcome) for outcome in self.outcomes[phase].values()]
        head = {"phase": phase, "device": self._device, **self._more.get(phase, {})}
        write_whole(self._folder / f"{phase}.json", head | {"parts": parts})

    def result(self, phase: str, part: str) -> Any:
        """Return what the part's first copy kept last; None: nothing."""
        outcome = self.outcomes.get(phase, {}).get(part)
        return outcome.results[0] if outcome is not None and outcome.results else None

    def end(self, summary: Mapping[str, object], table: str) -> str:
        """Write the summary and the table. Return why they could not be written, or an empty string."""
        try:
            write_whole(self._folder / SUMMARY, {"device": self._device, **summary})
            (self._folder / TABLE).write_text(table + "\n", encoding="utf-8")
        except OSError as error:
            return str(error)
        return ""
