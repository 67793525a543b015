"""Sorts the results of parallel tool calls in a prompt into the order of the calls.
Never looks at a result's content."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from serve_app.api.text.template_form import Message

TOOL = "tool"


def with_results_in_order(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with each run of results in the order of the calls before it.

    Agents send results in the order in which tools finish, with the ids of their calls. Most templates show no ids, so
    a model would take the first result for that of its first call. If an id matches no call, the run is left as it is.
    """
    if sum(message["role"] == TOOL for message in messages) < 2:
        return messages
    ordered: list[Message] = []
    for role, run in groupby(messages, key=lambda message: message["role"]):
        turns = list(run)
        if role == TOOL and ordered:
            turns = _sorted(turns, _ids_of(ordered[-1]))
        ordered += turns
    return ordered


def _ids_of(message: Message) -> list[Any]:
    return [call.get("id") for call in message.get("tool_calls") or ()]


def _sorted(results: list[Message], ids: list[Any]) -> list[Message]:
    places = {call_id: place for place, call_id in enumerate(ids) if call_id is not None}
    asked = [result.get("tool_call_id") for result in results]
    if len(places) < len(ids) or not places.keys() >= set(asked):
        return results
    return sorted(results, key=lambda result: places[result.get("tool_call_id")])
