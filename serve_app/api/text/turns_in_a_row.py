"""Adapts conversations for chat templates that insist on alternating turns: joins consecutive turns of the user or the
assistant, and puts a user turn before an assistant's first one.
Never changes a conversation for a template that accepts it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from serve_app.api.text.joined_turn import JoinedTurn
from serve_app.api.text.system_turns import SYSTEM_ROLES
from serve_app.api.text.template_form import Message

_IN_A_ROW = {("user", "user"), ("assistant", "assistant"), ("tool", "user")}
_MARKED = "<user>"
"""A temporary role for user text that is to become part of a tool's result."""
Takes = Callable[[Sequence[Message]], bool]
"""Whether a template takes a conversation."""

_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
_ASKED: Message = {"role": "user", "content": "a"}
_SILENT: Message = {"role": "user", "content": ""}
_ANSWERED: Message = {"role": "assistant", "content": "b"}
_CALLED: Sequence[Message] = (
    _ASKED,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": _CALL["id"], "content": "c"},
)


@dataclass(frozen=True, slots=True)
class Alternation:
    """What a template refuses."""

    roles: Collection[str] = ()
    """Two consecutive turns of these roles are refused."""
    after_tools: bool = False
    """A user turn that follows a tool's result is refused."""
    user_first: bool = False
    """A conversation that begins with an assistant turn is refused."""

    @classmethod
    def of(cls, takes: Takes) -> Alternation:
        once: list[Message] = [_ASKED, _ANSWERED, _ASKED]
        in_a_row: dict[str, list[Message]] = {
            "user": [_ASKED, _ASKED],
            "assistant": [_ASKED, _ANSWERED, _ANSWERED, _ASKED],
        }
        roles = [role for role, probe in in_a_row.items() if not takes(probe)] if takes(once) else []
        after_tools = takes([*_CALLED, _ANSWERED, _ASKED]) and not takes([*_CALLED, _ASKED])
        greeted = [_ANSWERED, _ASKED]
        user_first = takes([_SILENT, *greeted]) and not takes(greeted)
        return cls(frozenset(roles), after_tools, user_first)

    def fit(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Join consecutive turns. User text that follows a tool's result becomes part of the result, between plain
        marks: `<user>` and `</user>` on lines of their own. An empty user turn is put before an assistant's first
        one."""
        joined = _joined(messages, self._joins)
        if self.user_first and (begin := _first_turn(joined)) is not None and joined[begin]["role"] == "assistant":
            joined.insert(begin, _SILENT)
        return _joined(_marked_after_tools(joined), _is_in_result) if self.after_tools else joined

    def _joins(self, first: Message, second: Message) -> bool:
        """Whether to join two turns. Text after a call stays apart, because templates show a turn's text before its
        calls."""
        is_same = first["role"] == second["role"] in self.roles
        return is_same and bool(second.get("tool_calls") or not first.get("tool_calls"))


def _joined(messages: Iterable[Message], joins: Callable[[Message, Message], bool]) -> list[Message]:
    turns: list[JoinedTurn] = []
    for message in messages:
        if turns and joins(turns[-1].message, message):
            turns[-1].add(message, "\n\n")
        else:
            turns.append(JoinedTurn(message))
    return [turn.joined() for turn in turns]


def _marked_after_tools(messages: Iterable[Message]) -> Iterator[Message]:
    """Mark the user text that follows a tool's result. A turn with images stays, because results cannot have images."""
    is_after = False
    for message in messages:
        is_words = message["role"] == "user" and isinstance(message["content"], str)
        is_after = message["role"] == "tool" or (is_after and is_words)
        if is_after and is_words:
            yield {**message, "role": _MARKED, "content": f"<user>\n{message['content']}\n</user>"}
        else:
            yield message


def _is_in_result(first: Message, second: Message) -> bool:
    return (first["role"], second["role"]) == ("tool", _MARKED)


def _first_turn(messages: Sequence[Message]) -> int | None:
    """Return the place of the first turn that is not the system's."""
    return next((place for place, one in enumerate(messages) if one["role"] not in SYSTEM_ROLES), None)


def may_be_refused(messages: Sequence[Message]) -> bool:
    """Whether the messages have anything that such a template might refuse."""
    begin = _first_turn(messages)
    if begin is not None and messages[begin]["role"] == "assistant":
        return True
    return any((one["role"], other["role"]) in _IN_A_ROW for one, other in pairwise(messages))
