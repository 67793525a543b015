"""Owns where a conversation's later system turns stand in a prompt, whatever the chat template does with them.
Never changes the first one, nor a conversation that the template shows as it is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from serve_app.api.text.joined_turn import JoinedTurn, parts_of
from serve_app.api.text.template_form import Message, Render

SYSTEM_ROLES = ("system", "developer")

_TOLD = "probe-told"
_PROBES = (
    (("", "probe-first"), ("user", "probe-asked"), ("", _TOLD)),
    (("user", "probe-asked"), ("assistant", "probe-answered"), ("", _TOLD), ("user", "probe-again")),
)
"""A turn without a role is one of the system."""


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
    """The messages in a form that a template shows in their order, which does not show later turns of the roles `lost`.

    Many templates take a system turn only as the first: some raise, some drop later ones, some move all to the front.
    For these, system turns at the beginning become one, and a later one becomes the words of the user around it, in a
    plain mark: `<system>` and `</system>` on lines of their own.
    """
    if not any(message["role"] in lost for message in messages[1:]):
        return messages
    told: list[_Turn] = []
    for message in messages:
        last = told[-1] if told else None
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
            told.append(_Turn(message, has_moved=is_moved))
    return [turn.joined() for turn in told]


class _Turn(JoinedTurn):
    def __init__(self, message: Message, *, has_moved: bool) -> None:
        super().__init__(message)
        self.has_moved = has_moved
        """A system turn has become a part of it; so do the user's next words."""


def _marked(content: Any) -> Any:
    if isinstance(content, str):
        return f"<system>\n{content}\n</system>"
    return [*parts_of("<system>\n"), *content, *parts_of("\n</system>")]
