"""Keeps a conversation's later system turns in their places in a prompt, whatever the chat template does with them.
Never changes the first system turn, nor a conversation that the template already shows in order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from serve_app.api.text.joined_turn import JoinedTurn, parts_of
from serve_app.api.text.template_form import Message, Render

SYSTEM_ROLES = ("system", "developer")

_LATER = "probe-later"
_PROBES = (
    (("", "probe-first"), ("user", "probe-asked"), ("", _LATER)),
    (("user", "probe-asked"), ("assistant", "probe-answered"), ("", _LATER), ("user", "probe-again")),
)
"""An empty role stands for the system role that is probed."""


def shows_later_turns(role: str, render: Render) -> bool:
    """Whether a template shows turns of this role where they stand, between turns and at the end."""
    return all(_shows_in_order([(one or role, content) for one, content in probe], render) for probe in _PROBES)


def _shows_in_order(probe: Sequence[tuple[str, str]], render: Render) -> bool:
    text = render([{"role": role, "content": content} for role, content in probe])
    if text is None:
        return False
    places = [text.find(content) for _, content in probe]
    return -1 not in places and places == sorted(places)


def with_system_turns(messages: Sequence[Message], lost: Collection[str]) -> Sequence[Message]:
    """Change the messages so that a template shows all of them in order, although it loses later turns of the roles in
    `lost`.

    Many templates only take a system turn as the first one: some raise, some drop later ones, and some move all to the
    front. For these, system turns at the beginning are joined to one, and a later one becomes part of the user message
    around it, between plain marks: `<system>` and `</system>` on lines of their own.
    """
    if not any(message["role"] in lost for message in messages[1:]):
        return messages
    turns: list[_Turn] = []
    for message in messages:
        last = turns[-1] if turns else None
        is_moved = last is not None and message["role"] in lost
        if last is not None and is_moved and last.message["role"] in SYSTEM_ROLES:
            last.add(message, "\n")
            continue
        if is_moved:
            message = {"role": "user", "content": _marked(message["content"])}
        is_joined = last is not None and last.message["role"] == message["role"] == "user"
        if last is not None and is_joined and (is_moved or last.has_moved):
            last.add(message, "\n\n")
            last.has_moved = True
        else:
            turns.append(_Turn(message, has_moved=is_moved))
    return [turn.joined() for turn in turns]


class _Turn(JoinedTurn):
    def __init__(self, message: Message, *, has_moved: bool) -> None:
        super().__init__(message)
        self.has_moved = has_moved
        """A system turn has become part of it, so the user's next message is joined to it, too."""


def _marked(content: Any) -> Any:
    if isinstance(content, str):
        return f"<system>\n{content}\n</system>"
    return [*parts_of("<system>\n"), *content, *parts_of("\n</system>")]
