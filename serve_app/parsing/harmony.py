"""Defines the messages of Harmony, gpt-oss's format: their tags, and the reading of their headers.
Never decides how a message is shown: the parsers of calls and of reasoning do."""

from __future__ import annotations

import re
from dataclasses import dataclass

from serve_app.parsing.cursor import Cursor, Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
"""The tags that end a message. The last two also end the answer, so they are mostly not in its text."""
TAGS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
FUNCTIONS = "functions."
TO = "to="
"""Precedes a message's recipient. An answer may begin with it, because the prompt ends with `<|start|>assistant`."""

_HEADER_LETTERS = re.compile(r"[\w.:/= -]*")
_RECIPIENT = re.compile(rf"{TO}([^ ]+)")


@dataclass(frozen=True, slots=True)
class Header:
    channel: str
    recipient: str
    """Empty for the user."""

    @property
    def function(self) -> str:
        """The function that is called; empty if the message is not a call."""
        return self.recipient.removeprefix(FUNCTIONS) if self.recipient.startswith(FUNCTIONS) else ""


def read_header(cursor: Cursor, tag: str) -> Steps[Header | None]:
    """Read the rest of a header that began with `tag`, or with `TO`, including `<|message|>`; None if it is not a
    header.
    """
    parts = {START: "", CHANNEL: "", CONSTRAIN: "", TO: ""}
    while tag in parts:
        letters = yield from cursor.run(_HEADER_LETTERS)
        parts[tag] += f" {letters}" if parts[tag] else letters
        tag = yield from cursor.literal(CHANNEL, CONSTRAIN, MESSAGE)
    if not tag:
        return None
    channel = parts[CHANNEL].split()[:1]
    before = f"{TO}{parts[TO]}" if parts[TO] else parts[START]
    recipient = _RECIPIENT.search(f"{before} {parts[CHANNEL]}")
    return Header(channel[0] if channel else "", recipient[1] if recipient else "")
