"""Owns the reading of a streamed answer: it timestamps each line as it arrives, and parses the lines later.
Never waits for a block to fill: a line is stamped on arrival (Locust's `iter_lines` waits for 1,024 bytes)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Lines = list[tuple[float, bytes]]
"""The lines of an answer, each with the time at which it was complete."""


def read_lines(
    readline: Callable[[], bytes], clock: Callable[[], float], lines: Lines, pause: Callable[[], None]
) -> None:
    """Fill `lines` until the answer ends. Empty lines and comments are left out. `pause` is called after each line that
    is kept. Lines that were read before an exception stay in `lines`."""
    while line := readline():
        stamp = clock()
        if line.startswith(b"data:"):
            lines.append((stamp, bytes(line)))
            pause()


@dataclass(slots=True)
class Answer:
    """The parsed content of a stream."""

    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None


def parse_lines(lines: Sequence[tuple[float, bytes]]) -> Answer:
    """Parse a stream of chat or text completions. An answer that is incomplete or has no token counts carries an
    error."""
    answer = Answer()
    texts: list[str] = []
    data = b""
    for stamp, line in lines:
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            break
        try:
            _take(answer, texts, stamp, json.loads(data))
        except ValueError:
            answer.error = answer.error or f"no JSON: {data[:80]!r}"
        except (AttributeError, TypeError):  # another shape than an answer's
            answer.error = answer.error or f"no event of an answer: {data[:80]!r}"
    answer.text = "".join(texts)
    answer.error = answer.error or _incompleteness(answer, data)
    return answer


def _take(answer: Answer, texts: list[str], stamp: float, event: dict[str, Any]) -> None:
    if error := event.get("error"):
        message = error.get("message", error) if isinstance(error, dict) else error
        answer.error = f"error in the stream: {str(message)[:120]}"
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        texts.append(text if isinstance(text, str) else "")  # some servers send thoughts as a list of parts
        if text or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls"):
            answer.arrivals.append(stamp)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    if usage := event.get("usage"):
        answer.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        answer.output_tokens = int(usage.get("completion_tokens") or 0)


def _incompleteness(answer: Answer, last: bytes) -> str | None:
    if last != b"[DONE]":
        return "the stream has no end"
    if not answer.output_tokens:
        return "the answer counts no tokens (usage)"
    return None if answer.arrivals else "an answer without text"
