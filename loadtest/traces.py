"""Owns traces of loads (Azure's CSV, Mooncake's JSON lines, and plain ones), and their scaling to the server at hand.
Never contains data: a trace is read from the user's path, and an error in it is reported with its line."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
import math
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from loadtest.scenarios import text

BLOCK_TOKENS = 512
"""Tokens that one hash id stands for in Mooncake's traces."""
_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
PLAIN_COLUMNS = ["arrival_s", "prompt_tokens", "answer_tokens"]
"""Columns of a plain trace in CSV, and keys of one in JSON lines: seconds from any moment on, and tokens."""

_MOST_TOKENS = 2**53
"""More than any model takes; a larger number is none that a float has, and lengths are scaled by floats."""


class BadTrace(ValueError):
    """A file is not in a known trace format, or has impossible values."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace."""

    at_s: float
    """Time since the trace's first request."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks. Two prompts that begin with the same ids begin with the same text."""


@dataclass(frozen=True, slots=True)
class Trace:
    rows: tuple[Row, ...]
    block_tokens: int = BLOCK_TOKENS
    left_out: int = 0
    """Number of requests that were longer than the server accepts."""

    @property
    def seconds(self) -> float:
        return self.rows[-1].at_s - self.rows[0].at_s

    @property
    def ideal_hit_share(self) -> float:
        """The share of blocks that belong to a prefix of an earlier request, which is what an unbounded cache would
        find. 0 if the trace has no ids."""
        children: dict[tuple[int, int], int] = {}  # (prefix, block that follows) to the prefix with it
        hits = total = 0
        for row in self.rows:
            total += len(row.blocks)
            prefix = 0
            for block in row.blocks:
                hits += (prefix, block) in children
                prefix = children.setdefault((prefix, block), len(children) + 1)
        return hits / total if total else 0.0


def read_trace(path: Path) -> Trace:
    """Read a trace in the format of its name, `.csv` or `.jsonl`, either also with `.gz`. Its first line says whether
    it is a plain one (PLAIN_COLUMNS), or Azure's or Mooncake's.

    Raises:
        BadTrace: the name has another ending, or a line is not in the format; the message has the line.
        OSError: the file cannot be read.
    """
    kinds: dict[str, Callable[[TextIO], Iterator[tuple[float, Row]]]] = {".csv": _csv, ".jsonl": _json_lines}
    read = kinds.get(Path(path.name.removesuffix(".gz")).suffix)
    if read is None:
        raise BadTrace(f"{path}: a trace is a .csv (plain, Azure's) or a .jsonl (plain, Mooncake's), or a .gz of it")
    with path.open("rb") as packed:
        binary = cast(BinaryIO, gzip.GzipFile(fileobj=packed)) if path.suffix == ".gz" else packed
        stream = io.TextIOWrapper(binary, encoding="utf-8", newline="")
        try:
            rows = list(read(stream))
        except (BadTrace, UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as bad:
            raise BadTrace(f"{path}: {bad}") from bad
    if not rows:
        raise BadTrace(f"{path}: no requests")
    rows.sort(key=lambda found: found[0])
    return Trace(tuple(dataclasses.replace(row, at_s=at - rows[0][0]) for at, row in rows))


def _csv(stream: TextIO) -> Iterator[tuple[float, Row]]:
    lines = csv.reader(stream)
    try:
        yield from _csv_rows(lines)
    except csv.Error as bad:  # of the reader itself, such as a field that is too long
        raise BadTrace(f"line {lines.line_num}: {bad}") from bad


def _csv_rows(lines: Iterator[list[str]]) -> Iterator[tuple[float, Row]]:
    head = next(lines, [])
    if head not in (_AZURE_COLUMNS, PLAIN_COLUMNS):
        known = " or ".join(", ".join(columns) for columns in (PLAIN_COLUMNS, _AZURE_COLUMNS))
        raise BadTrace(f"line 1: the columns are {known}, not {', '.join(head)!r}")
    for number, fields in enumerate(lines, 2):
        try:
            at, prompt, output = fields
            row = _row(int(prompt), int(output))
            yield _seconds(float(at)) if head == PLAIN_COLUMNS else _timestamp(at), row
        except ValueError as bad:
            raise BadTrace(f"line {number}: {bad}") from bad


def _timestamp(text: str) -> float:
    """Azure's fractions of a second have seven digits; datetime takes six."""
    return datetime.fromisoformat(text[:26]).replace(tzinfo=UTC).timestamp()


def _json_lines(stream: TextIO) -> Iterator[tuple[float, Row]]:
    for number, line in enumerate(stream, 1):
        try:
            found = json.loads(line)
            yield _plain(found) if PLAIN_COLUMNS[0] in found else _mooncake(found)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as bad:
            raise BadTrace(f"line {number}: {bad!r}") from bad


def _plain(found: dict[str, Any]) -> tuple[float, Row]:
    at, prompt, answer = (found[name] for name in PLAIN_COLUMNS)
    return _seconds(float(at)), _row(int(prompt), int(answer))


def _mooncake(found: dict[str, Any]) -> tuple[float, Row]:
    blocks = tuple(int(block) for block in found["hash_ids"])
    row = _row(int(found["input_length"]), int(found["output_length"]), blocks)
    if len(blocks) != -(-row.prompt_tokens // BLOCK_TOKENS):
        raise BadTrace(f"{len(blocks)} hash_ids for {row.prompt_tokens} tokens")
    return _seconds(found["timestamp"] / 1e3), row


def _seconds(at: float) -> float:
    if not math.isfinite(at):
        raise BadTrace(f"a time of {at:g} s")
    return at


def _row(prompt: int, output: int, blocks: tuple[int, ...] = ()) -> Row:
    if max(prompt, output) > _MOST_TOKENS:
        raise BadTrace(f"a length of more than {_MOST_TOKENS} tokens")
    if prompt < 0 or output < 0:
        raise BadTrace(f"lengths of {prompt} and {output} tokens")
    return Row(0.0, prompt, output, blocks)


def scaled(
    trace: Trace,
    *,
    rate: float | None = None,
    lengths: float = 1.0,
    longest: int | None = None,
    seconds: float | None = None,
) -> Trace:
    """Adapt a trace to what the server at hand can take.

    Args:
        rate: mean requests a second, of those that are not left out; all gaps are stretched or squeezed alike, so that
            bursts stay bursts.
        lengths: factor for all prompts, answers and blocks, so that shared prefixes stay shared.
        longest: limit in tokens of prompt and answer together; longer requests are left out and counted.
        seconds: length of the trace after stretching; later requests are dropped.

    Raises:
        ValueError: a factor or rate is not positive, or no request is left.
    """
    for name, value in (("rate", rate), ("lengths", lengths), ("seconds", seconds)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} is a positive number, not {value:g}")
    rows = [_scaled_row(row, lengths) for row in trace.rows]
    kept = [row for row in rows if longest is None or row.prompt_tokens + row.output_tokens <= longest]
    if not kept:
        raise ValueError(f"every request of the trace is longer than {longest} tokens; scale the lengths")
    stretch, begin = _stretch(kept, rate), kept[0].at_s
    moved = [dataclasses.replace(row, at_s=(row.at_s - begin) * stretch) for row in kept]
    moved = [row for row in moved if seconds is None or row.at_s < seconds]
    block_tokens = max(round(trace.block_tokens * lengths), 1)
    return Trace(tuple(moved), block_tokens, trace.left_out + len(rows) - len(kept))


def _stretch(rows: list[Row], rate: float | None) -> float:
    """Return the factor of all gaps. `rows`: those that are sent, since the rate is theirs."""
    seconds = rows[-1].at_s - rows[0].at_s
    return 1.0 if rate is None or not seconds else (len(rows) - 1) / seconds / rate


def _scaled_row(row: Row, lengths: float) -> Row:
    prompt, output = (max(round(tokens * lengths), 1) for tokens in (row.prompt_tokens, row.output_tokens))
    return dataclasses.replace(row, prompt_tokens=prompt, output_tokens=output)


def prompt_of(row: Row, index: int, block_tokens: int, seed: int) -> str:
    """Make a text of as many frequent words as the row has prompt tokens. Rows that begin with the same block ids begin
    with the same words, in every process. The part that a row shares with no other depends on its `index` in the
    trace."""
    words: list[str] = []
    for block in row.blocks[: row.prompt_tokens // block_tokens]:
        words.append(text(random.Random(f"block {seed} {block}"), block_tokens))
    rest = row.prompt_tokens - block_tokens * len(words)
    if rest:
        words.append(_rest(row, index, seed, rest, len(words)))
    return " ".join(words)


def _rest(row: Row, index: int, seed: int, tokens: int, whole_blocks: int) -> str:
    """Make the text of the last block, which is not full. Prompts with the same id for it share all of it, as in the
    trace."""
    shared = row.blocks[whole_blocks] if whole_blocks < len(row.blocks) else None
    name = f"rest {seed} {index}" if shared is None else f"block {seed} {shared}"
    return text(random.Random(name), tokens)
