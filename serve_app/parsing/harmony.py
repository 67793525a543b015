"""Owns the messages of Harmony, gpt-oss's format: their tags, and what a message's header says.
Never decides what is shown of a message: the parsers of calls and of reasoning do."""

from __future__ import annotations

import re
from dataclasses import dataclass

from serve_app.parsing.cursor import Cursor, Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
"""Of a message. The last two end the answer too, so they are mostly not in its text."""
TAGS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
FUNCTIONS = "functions."
TO = "to="
"""What a message's recipient follows: where the answer begins with it, the prompt has written `<|start|>assistant`."""

_HEADER_LETTERS = re.compile(r"[\w.:/= -]*")
_RECIPIENT = re.compile(rf"{TO}([^ ]+)")


@dataclass(frozen=True, slots=True)
class Header:
    channel: str
    recipient: str
    """Empty: the user."""

    @property
    def function(self) -> str:
        """The function that is called; empty if none is."""
        return self.recipient.removeprefix(FUNCTIONS) if self.recipient.startswith(FUNCTIONS) else ""


def read_header(cursor: Cursor, tag: str) -> Steps[Header | None]:
    """The rest of a header that began with this tag, or with `TO`, up to and with `<|message|>`. None: it is none."""
    told = {START: "", CHANNEL: "", CONSTRAIN: "", TO: ""}
    while tag in told:
        told[tag] += yield from cursor.run(_HEADER_LETTERS)
        tag = yield from cursor.literal(CHANNEL, CONSTRAIN, MESSAGE)
    if not tag:
        return None
    channel = told[CHANNEL].split()[:1]
    before = f"{TO}{told[TO]}" if told[TO] else told[START]
    recipient = _RECIPIENT.search(f"{before} {told[CHANNEL]}")
    return Header(channel[0] if channel else "", recipient[1] if recipient else "")
