"""Owns Codex's grammar of patches, patches drawn from it, and a reader of its own that decides what a patch is.
Never uses llguidance, which must not judge what is tested with it."""

from __future__ import annotations

import random
import re

GRAMMAR = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""The grammar as version 0.169.0 sends it."""

_LETTERS = "abcXYZ019 .,;:_-+*/\\\"'`$%&#@!?(){}[]<>|~^=\té漢🦜\r\x01"


def draw(rng: random.Random) -> str:
    """Draw a patch of any shape that the grammar has."""
    hunks = "".join(rng.choice((_add, _delete, _update))(rng) for _ in range(rng.randint(1, 4)))
    return f"*** Begin Patch\n{hunks}*** End Patch" + rng.choice(("", "\n"))


def is_patch(text: str) -> bool:
    """Decide line by line which lines may follow which."""
    lines = text.split("\n")
    if lines[-1] == "" and len(lines) > 1:
        lines.pop()
    state = "start"
    for line in lines:
        kinds = [kind for kind in _FOLLOWS[state] if _LINES[kind].fullmatch(line)]
        if not kinds:
            return False
        state = kinds[0]
    return state == "end"


def _text(rng: random.Random, least: int) -> str:
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(least, 12)))


def _add(rng: random.Random) -> str:
    lines = "".join(f"+{_text(rng, 0)}\n" for _ in range(rng.randint(1, 4)))
    return f"*** Add File: {_text(rng, 1)}\n{lines}"


def _delete(rng: random.Random) -> str:
    return f"*** Delete File: {_text(rng, 1)}\n"


def _update(rng: random.Random) -> str:
    move = rng.choice(("", f"*** Move to: {_text(rng, 1)}\n"))
    lines = [_changed(rng) for _ in range(rng.randint(0, 5))]
    end = "*** End of File\n" if lines and rng.random() < 0.3 else ""
    return f"*** Update File: {_text(rng, 1)}\n{move}{''.join(lines)}{end}"


def _changed(rng: random.Random) -> str:
    mark = rng.choice(("@@", "@@ ", "+", "-", " "))
    return f"{mark}{_text(rng, 1) if mark == '@@ ' else '' if mark == '@@' else _text(rng, 0)}\n"


_LINES = {
    "begin": re.compile(r"\*\*\* Begin Patch"),
    "add": re.compile(r"\*\*\* Add File: [^\n]+"),
    "delete": re.compile(r"\*\*\* Delete File: [^\n]+"),
    "update": re.compile(r"\*\*\* Update File: [^\n]+"),
    "move": re.compile(r"\*\*\* Move to: [^\n]+"),
    "added": re.compile(r"\+[^\n]*"),
    "changed": re.compile(r"@@( [^\n]+)?|[-+ ][^\n]*"),
    "eof": re.compile(r"\*\*\* End of File"),
    "end": re.compile(r"\*\*\* End Patch"),
}
_HUNKS = ("add", "delete", "update", "end")
_FOLLOWS = {
    "start": ("begin",),
    "begin": _HUNKS[:3],
    "add": ("added",),
    "added": ("added", *_HUNKS),
    "delete": _HUNKS,
    "update": ("move", "changed", *_HUNKS),
    "move": ("changed", *_HUNKS),
    "changed": ("changed", "eof", *_HUNKS),
    "eof": _HUNKS,
    "end": (),
}
